"""GPU-related behavior of a run as far as a CPU can show it; tests/runs/test_gpu.py has the rest."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import itertools
import json
import os
import queue
import re
import subprocess
import sys
import sysconfig
import time
from types import SimpleNamespace

import deepspeed
import pytest
import torch
from deepspeed.runtime.fp16 import loss_scaler
from deepspeed.utils import timer
from deepspeed.utils.config import get_timers_config
from helpers import ROOT, clean_environment, folder_of, interrupted, record, rejected, run_here, tiny_args

import grpo
import rewards
import utils
from runtime.training import deepspeed_zero, pretrained
from runtime.training.deepspeed_zero import _is_renamed


def python(code: str, **environment: str) -> str:
    """Return the output of a new interpreter."""
    settings = {k: v for k, v in clean_environment().items() if k not in ("TRITON_F32_DEFAULT", "VLLM_NO_USAGE_STATS")}
    line = [sys.executable, "-c", code]
    done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, env=settings | environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


SHOW = """
from runtime.system import process
process.prepare_environment({dtype!r})
import os
print(os.environ.get("TRITON_F32_DEFAULT"), os.environ["VLLM_NO_USAGE_STATS"])
"""


def test_the_environment_of_fp32_has_exact_products():
    """Triton multiplies fp32 in tf32 unless told otherwise before its import; bf16 runs and the user's word stay."""
    assert python(SHOW.format(dtype="float32")) == "ieee 1"
    assert python(SHOW.format(dtype="auto")) == "None 1"
    assert python(SHOW.format(dtype="float32"), TRITON_F32_DEFAULT="tf32", VLLM_NO_USAGE_STATS="0") == "tf32 0"


@pytest.mark.parametrize(
    ("name", "capability", "wanted", "expected"),
    [
        ("Tesla V100", (7, 0), "auto", "CUDA 13"),  # torch 2.13 has no code for it, in no type
        ("Tesla V100", (7, 0), "float16", "CUDA 13"),
        ("Tesla T4", (7, 5), "auto", torch.float16),
        ("Tesla T4", (7, 5), "bfloat16", "pass --dtype float16 or float32"),  # vLLM would name a flag that is none here
        ("Tesla T4", (7, 5), "float32", torch.float32),
        ("A100", (8, 0), "auto", torch.bfloat16),
        ("A100", (8, 0), "float16", torch.float16),
    ],
)
def test_a_gpu_gets_the_type_that_it_has(monkeypatch, capsys, name, capability, wanted, expected):
    """Or is rejected before a model is loaded, with the remedy."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    if isinstance(expected, torch.dtype):
        assert pretrained.resolve_device(grpo.Args(dtype=wanted))[1:] == (expected, "sdpa")
        return
    said = rejected(capsys, pretrained.resolve_device, grpo.Args(dtype=wanted))
    assert name in said and expected in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("capabilities", "chosen"),
    [
        ({"avx2": True, "avx512_f": True, "avx512_bf16": False, "amx_bf16": False}, "float32"),
        ({"avx512_bf16": True}, "bfloat16"),
        ({"amx_bf16": True, "avx512_bf16": False}, "bfloat16"),
        ({"architecture": "aarch64", "neon": True}, "float32"),
    ],
)
def test_a_cpu_computes_in_bf16_where_it_has_instructions_for_it(monkeypatch, capabilities, chosen):
    """A flag wins, and so does the type of the run that is resumed."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    _, dtype, attention = pretrained.resolve_device(grpo.Args())
    assert (dtype, attention) == (getattr(torch, chosen), "grouped" if chosen == "bfloat16" else "sdpa")
    resumed = grpo.Args()
    resumed.recorded_choices = {"dtype": "bfloat16" if chosen == "float32" else "float32"}
    assert pretrained.resolve_device(resumed)[1] != dtype
    for name in ("bfloat16", "float32"):
        assert pretrained.resolve_device(grpo.Args(dtype=name))[1] == getattr(torch, name)


@pytest.mark.integration
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has bf16 in any case")
def test_a_resumed_run_keeps_its_type(tiny, tmp_path, monkeypatch):
    """On a CPU that would choose another: from its folder, from a checkpoint that is named; not if overwritten."""
    monkeypatch.setattr(pretrained, "cpu_dtype", lambda: "float32")
    args = tiny_args(tiny, tmp_path / "runs", dtype="auto", micro_batch_tokens=None, save_every=1, run_name="kept")
    interrupted(args, monkeypatch, after=1)
    monkeypatch.setattr(pretrained, "cpu_dtype", lambda: "bfloat16")
    checkpoint = folder_of(args) / "checkpoints" / "step_000001"
    named = dataclasses.replace(args, run_name="named", resume=str(checkpoint))
    for again in (named, args):
        run_here(again)
        config = json.loads((folder_of(again) / "config.json").read_text())
        assert config["resumed_after"] == 1 and config["resolved"]["dtype"] == "float32"
    anew = dataclasses.replace(args, overwrite=True)
    grpo.preflight(anew)
    assert pretrained.resolve_device(anew)[1] == torch.bfloat16


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    "changes, refused", [({}, True), ({"dry_run": True}, False), ({"rollout": "hf"}, False)], ids=str
)
def test_a_cuda_build_without_a_gpu_is_no_cpu(monkeypatch, capsys, changes, refused):
    """A login node, or a job that got no GPU: vLLM's CUDA build does not run there, and sizes are of another device."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    args = grpo.Args(dtype="float32", **changes)
    if refused:
        with pytest.raises(SystemExit) as stop:
            pretrained.resolve_device(args)
        assert stop.value.code == 2
    else:
        assert pretrained.resolve_device(args)[0].type == "cpu"
    said = "".join(capsys.readouterr())
    assert "no GPU is visible" in said and "studies/rehearse_gpu_run.py CARD" in said


def test_cudnn_attention_is_off_with_and_without_an_engine(tiny):
    """vLLM switches it off in the process that imports it; the trainer's kernel must be the same in every process."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    pretrained.load_model(grpo.Args(model_name_or_path=str(tiny)), torch.float32, "sdpa")
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize("launched, ranks, threads", [(True, 1, 12), (True, 4, 3), (True, 16, 1), (False, 1, None)])
def test_an_offloaded_optimizer_has_its_share_of_the_cores(monkeypatch, launched, ranks, threads):
    """torchrun and accelerate set OMP_NUM_THREADS to 1 for several ranks."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if launched:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setattr(deepspeed_zero.process, "usable_cores", lambda: 12.5)
    assert deepspeed_zero.offload_threads() == (threads or torch.get_num_threads())


@pytest.mark.integration
@pytest.mark.skipif(torch.cuda.is_available(), reason="makes a CPU out to be one of DeepSpeed's devices for fp16")
def test_fp16_is_trained_with_a_scaled_loss(tiny, tmp_path, monkeypatch):
    """DeepSpeed's own scaling, here on a CPU: gradients as in fp32, a step that is dropped leaves the scale alone."""
    found = []
    plain_backward, plain_loss, calls = deepspeed_zero.backward_and_step, grpo.token_loss, itertools.count()

    def backward(engine, *rest):
        plain_backward(engine, *rest)
        found.append(engine.optimizer.loss_scale)

    def small(*rest):  # gradients that DeepSpeed's first scale, 2**16, leaves below the largest number of fp16
        loss, pieces = plain_loss(*rest)
        return loss * 0.1, pieces

    def third_is_poisoned(*rest):
        loss, pieces = small(*rest)
        return loss * (float("nan") if next(calls) == 2 else 1.0), pieces

    changes = {"learning_rate": 1e-4, "eval_prompts": 0, "total_steps": 4, "micro_batch_tokens": 4096}
    monkeypatch.setattr(grpo, "token_loss", small)
    exact = run_here(tiny_args(tiny, tmp_path / "exact", **changes))
    monkeypatch.setattr(deepspeed.accelerator.get_accelerator(), "is_fp16_supported", lambda: True, raising=False)
    monkeypatch.setattr(pretrained, "resolve_device", lambda args: (torch.device("cpu"), torch.float16, "eager"))
    monkeypatch.setattr(deepspeed_zero, "backward_and_step", backward)
    monkeypatch.setattr(grpo, "token_loss", third_is_poisoned)
    half = run_here(tiny_args(tiny, tmp_path / "half", dtype="float16", **changes))
    print(found, [(m["optim/grad_norm"], m["sampler/logprob_diff_mean"]) for m in half if m["optim/steps"]])
    assert [m["optim/skipped"] for m in half] == [0, 0, 1, 0]
    assert found == [2.0**16] * 4
    for step in (0, 1):
        assert half[step]["optim/grad_norm"] == pytest.approx(exact[step]["optim/grad_norm"], rel=0.02)
    with open(folder_of(tiny_args(tiny, tmp_path / "half", dtype="float16", **changes)) / "config.json") as file:
        assert '"dtype": "float16"' in file.read()


@pytest.mark.parametrize(
    "cores, ranks, expected", [(2, 1, 1), (4, 1, 2), (16, 1, 14), (64, 8, 6), (8, 8, 1), (128, 1, 32)]
)
def test_verifiers_have_the_cores_that_are_left(monkeypatch, cores, ranks, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert rewards.worker_count() == expected
    started = []
    monkeypatch.setattr(rewards, "RewardPool", lambda workers, *rest: started.append(workers) or IDLE)
    rewards.Verifiers(grpo.Args(), [], None, None)
    assert started == [expected]


IDLE = SimpleNamespace(check=lambda problems: "")


@pytest.mark.parametrize("world_size, overlaps", [("1", False), ("2", True)])
def test_one_rank_has_no_reduction_to_overlap(monkeypatch, world_size, overlaps):
    monkeypatch.setenv("WORLD_SIZE", world_size)
    config = deepspeed_zero.deepspeed_config(grpo.Args(), torch.bfloat16, cuda=True)
    assert config["zero_optimization"]["overlap_comm"] is overlaps


def test_float16_is_rejected_without_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said = rejected(capsys, pretrained.resolve_device, grpo.Args(dtype="float16"))
    assert "--dtype float16 needs a GPU" in said and "use bfloat16 or float32" in said


def test_what_deepspeed_is_told():
    """By the flags and the type; the rest of the settings is the same in every run."""

    def config(dtype=torch.float32, cuda=False, **changes):
        return deepspeed_zero.deepspeed_config(grpo.Args(**changes), dtype, cuda)

    plain, half = config(), config(torch.bfloat16)
    assert "bf16" not in plain and "data_types" not in plain
    assert half["bf16"] == {"enabled": True} and half["data_types"] == {"grad_accum_dtype": "fp32"}
    scaled = config(torch.float16)
    assert "bf16" not in scaled and scaled["fp16"]["enabled"] and scaled["data_types"] == half["data_types"]
    assert config(max_grad_norm=0.3)["gradient_clipping"] == 0.3
    assert config(zero_stage=3)["zero_optimization"]["stage"] == 3
    assert not {"offload_optimizer", "offload_param"} & plain["zero_optimization"].keys()
    for cuda in (False, True):
        zero = config(cuda=cuda, zero_stage=3, offload=("optimizer", "param"))["zero_optimization"]
        assert zero["offload_optimizer"] == zero["offload_param"] == {"device": "cpu", "pin_memory": cuda}


def test_no_pass_of_deepspeed_waits_for_the_gpu_to_be_timed(monkeypatch):
    """By its own timer of throughput, which by default waits for the device in each forward pass from step 3 on."""
    waits = []
    monkeypatch.setattr(timer, "get_accelerator", lambda: SimpleNamespace(synchronize=lambda: waits.append(1)))
    for settings in ({}, deepspeed_zero.deepspeed_config(grpo.Args(), torch.bfloat16, cuda=True)):
        clock = timer.ThroughputTimer(get_timers_config(settings), 1)
        waits.clear()
        for _ in range(4):
            clock.start()
            clock.stop(global_step=True)
        assert len(waits) == (0 if settings else 4)


def test_one_overflow_halves_the_loss_scale(monkeypatch):
    """By DeepSpeed's own scaler; its default waits for a second one, and ten skipped steps in a row end a run."""
    monkeypatch.setattr(loss_scaler.dist, "get_rank", lambda: 0)
    hysteresis = deepspeed_zero.deepspeed_config(grpo.Args(), torch.float16, cuda=True)["fp16"]["hysteresis"]
    scaler = loss_scaler.DynamicLossScaler(2**16, 1000, 1, hysteresis, consecutive_hysteresis=False)
    scaler.update_scale(True)
    assert scaler.cur_scale == 2**15


def test_what_deepspeed_is_asked_in_a_backward_pass(monkeypatch):
    """A step after the last micro-batch; then gradients of a dropped step are cleared, which it would keep."""
    order = []
    engine = SimpleNamespace(
        set_gradient_accumulation_boundary=lambda is_boundary: order.append(is_boundary),
        backward=lambda loss: order.append("backward"),
        step=lambda: order.append("step"),
    )
    monkeypatch.setattr(deepspeed_zero, "clear_dropped_gradients", lambda engine: order.append("clear"))
    deepspeed_zero.backward_and_step(engine, torch.zeros(()), False)
    assert order == [False, "backward"]
    order.clear()
    deepspeed_zero.backward_and_step(engine, torch.zeros(()), True)
    assert order == [True, "backward", "step", "clear"]


def test_deepspeed_compiles_nothing_at_the_start(monkeypatch):
    """Compiling would take a lock that a killed process leaves behind."""
    import accelerate

    given = {}
    monkeypatch.setattr(deepspeed.ops, "__compatible_ops__", {"ShareMemCommBuilder": True})
    monkeypatch.setattr(accelerate, "Accelerator", lambda **rest: given.update(rest))
    deepspeed_zero.make_accelerator(grpo.Args(zero_stage=1), torch.float32, torch.device("cpu"))
    assert deepspeed.ops.__compatible_ops__ == {}
    assert given["deepspeed_plugin"].hf_ds_config.config["zero_optimization"]["stage"] == 1
    (group,) = given["kwargs_handlers"]
    assert group.backend == "gloo" and group.timeout.days == 1


def test_a_phase_inside_another_is_part_of_the_outer_one():
    """And a step's seconds begin with the step."""
    clock = utils.Stopwatch()
    time.sleep(0.5)
    clock.restart()
    with clock("eval"), clock("generate"):
        time.sleep(0.01)
    with clock("update"):
        time.sleep(0.01)
    assert set(clock.seconds) == {"eval", "update"}
    metrics = clock.metrics(tokens=50, trained=10.0)
    assert 0.02 <= metrics["time/step"] < 0.5
    assert metrics["perf/tokens_per_second"] == 50 / metrics["time/step"]
    assert metrics["perf/update_tokens_per_second"] == 10.0 / metrics["time/update"]


@pytest.mark.parametrize("device", ["cuda:1", "cpu"])
def test_the_thread_of_transformers_works_on_the_gpu_of_its_rank(monkeypatch, device):
    """A new thread is on the first one, whichever the main thread has chosen: before the model is loaded it moves."""
    done = []
    model = SimpleNamespace(to=lambda place: done.append(str(place)) or model, eval=lambda: model)
    monkeypatch.setattr(pretrained, "resolve_device", lambda args: (torch.device(device), torch.float32, "sdpa"))
    monkeypatch.setattr(torch.cuda, "set_device", lambda place: done.append(f"the thread: {place}"))
    monkeypatch.setattr(pretrained, "load_model", lambda *rest: model)
    inbox, outbox = queue.Queue(), queue.Queue()
    inbox.put(("sleep",))  # it has nothing to give back, and says so: the main thread waits for that
    inbox.put(("stop",))
    utils.hf_thread(grpo.Args(), torch.float32, 0, 1, [2], inbox, outbox)
    assert list(outbox.queue) == [("ready",), ("slept",)]
    assert done == ([f"the thread: {device}"] if device != "cpu" else []) + [device]


def test_the_peak_of_a_gpu_is_that_of_the_step(monkeypatch):
    """With torch made to report a GPU whose memory had its peak before the step."""
    peak = [8 * 2**30]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: peak[0])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: peak.__setitem__(0, 2**30))
    clock = utils.Stopwatch()
    with clock("update"):
        pass
    assert clock.metrics(1, 1.0)["perf/gpu_peak_gib"] == 1.0


def test_an_offloaded_optimizer_is_fused():
    """One pass over memory in place of eight; the steps of DeepSpeed's offloading with it are in test_models.py."""
    parameters = [torch.nn.Parameter(torch.ones(4))]
    for offload in (False, True):
        optimizer = utils.make_optimizer(parameters, 0.1, grpo.Args(offload=("optimizer",) * offload))
        assert optimizer.defaults["fused"] is True


def test_a_phase_ends_when_the_gpu_is_done(monkeypatch):
    """Pending work of the device is waited for at both ends of a phase, and not counted to the next one."""
    pending = [0.0]

    def wait():
        time.sleep(pending[0])
        pending[0] = 0.0

    monkeypatch.setattr(deepspeed_zero, "finish_gpu_work", wait)
    clock = utils.Stopwatch()
    with clock("logprobs"):
        pending[0] = 0.2
    with clock("update"):
        pass
    pending[0] = 0.2  # given to the device between two phases
    with clock("push"):
        pass
    assert clock.seconds["logprobs"] >= 0.2 and clock.seconds["update"] < 0.1 and clock.seconds["push"] < 0.1


def verification(monkeypatch, gpu: str) -> None:
    """The check of scripts/setup.sh, told that torch is for CUDA and whether a GPU is there, where torch finds none."""
    text = (ROOT / "scripts" / "setup.sh").read_text()
    check = re.search(r"<<'EOF'\n(.*?)\nEOF\n", text, re.DOTALL)[1]
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1")
    monkeypatch.setattr(sys, "argv", ["-", "cuda", gpu])
    exec(check, {"__name__": "__main__"})


def test_a_gpu_that_does_not_answer_fails_the_setup(monkeypatch):
    with pytest.raises(AssertionError, match=r"finds no GPU here; does the driver know CUDA 13\.0\?"):
        verification(monkeypatch, "yes")


def test_what_triton_compiles_with_is_checked_by_the_setup(tmp_path, monkeypatch):
    """A C compiler and Python.h: else the engine's thread would end in a page of traceback."""
    (tmp_path / "gcc").write_text("#!/bin/sh\n")
    (tmp_path / "gcc").chmod(0o755)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(AssertionError, match=r"Python\.h.*apt install gcc python3"):
        verification(monkeypatch, "no")
    (tmp_path / "Python.h").touch()
    verification(monkeypatch, "no")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(AssertionError, match="neither gcc nor clang: apt install gcc python3"):
        verification(monkeypatch, "no")


NVIDIA_SMI = """#!/bin/sh
case "$*" in
    -L) echo "GPU 0: NVIDIA A100" ;;
    *driver_version*) echo "{driver}" ;;
    *) echo "| NVIDIA-SMI {driver}   Driver Version: {driver}   CUDA Version: {cuda} |" ;;
esac
"""


@pytest.mark.parametrize(
    ("driver", "cuda", "code"),
    [
        ("535.183.01", "12.2", 1),
        ("570.124.06", "12.8", 1),
        ("580.65.06", "13.0", 0),
        ("535.183.01", "13.0", 0),  # with the libraries of forward compatibility
        (None, None, 0),
    ],
)
def test_a_driver_that_is_too_old_ends_the_setup_before_a_download(tmp_path, driver, cuda, code):
    """Saying what to do; without a GPU, as on a login node, there is nothing to check."""
    text = (ROOT / "scripts" / "setup.sh").read_text()
    functions = re.search(r"^fail\(\) \{.*?^\}\n", text, re.DOTALL | re.MULTILINE)[0]
    functions += re.search(r"^check_driver\(\) \{.*?^\}\n", text, re.DOTALL | re.MULTILINE)[0]
    if driver is not None:
        (tmp_path / "nvidia-smi").write_text(NVIDIA_SMI.format(driver=driver, cuda=cuda))
        (tmp_path / "nvidia-smi").chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    line = ["bash", "-euo", "pipefail", "-c", f"{functions}check_driver\necho checked"]
    done = subprocess.run(line, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == code, done.stderr
    assert ("checked" in done.stdout) == (code == 0)
    if code:
        for words in (driver, f"CUDA {cuda.split('.')[0]}", "580 or later", "cuda-compat-13-0", "FLAVOR=cpu"):
            assert words in done.stderr
    before, after = text.index("[[ $flavor == cpu ]] || check_driver"), text.index("rm -rf .venv")
    assert before < after, "nothing is removed or fetched before"


# ------------------------------------------------------------------------------------------------------ pushes, weights


def test_the_weights_of_a_push_are_counted(tiny, tmp_path, tiny_model):
    """GiB and GiB/s of every step; the tied head counts."""
    expected = sum(w.numel() * 4 for w in tiny_model.state_dict().values()) / 2**30
    for step in run_here(tiny_args(tiny, tmp_path, eval_prompts=0)):
        assert step["perf/push_gib"] == pytest.approx(expected)
        assert step["perf/push_gib_per_second"] > 0


@pytest.mark.integration
def test_zero_3_gathers_in_buckets(tiny, tmp_path, monkeypatch):
    """Three buckets at least, none of which has all; the run is that of a push that gathers the whole model at once."""
    gathered = []
    plain = deepspeed.zero.GatheredParameters

    class Spy(plain):
        def __init__(self, params, *rest, **named):
            gathered.append(sum(p.ds_numel for p in params))
            super().__init__(params, *rest, **named)

    flags = {"zero_stage": 3, "learning_rate": 1e-2}
    whole = deepspeed_zero.current_weights
    with monkeypatch.context() as patch:
        patch.setattr(deepspeed_zero, "current_weights", lambda *rest: whole(*rest[:3]))
        args = tiny_args(tiny, tmp_path / "whole", **flags)
        run_here(args)
        expected = record(folder_of(args))
    monkeypatch.setattr(deepspeed_zero.ShardedWeights, "bucket_elements", 20_000)
    monkeypatch.setattr(deepspeed.zero, "GatheredParameters", Spy)
    seen = []
    monkeypatch.setattr(deepspeed_zero, "current_weights", lambda *rest: (seen.append(whole(*rest)), seen[-1])[1])
    args = tiny_args(tiny, tmp_path / "buckets", **flags)
    run_here(args)
    assert record(folder_of(args)) == expected
    pushed = [weights for weights in seen if isinstance(weights, deepspeed_zero.ShardedWeights)]
    assert len(pushed) == 3  # before the first step, and after both
    total = sum(w.ds_numel for w in pushed[0].entries.values())
    assert len(gathered) >= 9 and sorted(gathered)[-4] < total / 2  # the largest: the model that is saved


def test_a_tied_head_is_gathered_once():
    """It stays the same tensor as the embedding, which a saved model then holds once; both are copies."""
    module = torch.nn.ModuleDict({"embedding": torch.nn.Embedding(5, 3), "head": torch.nn.Linear(3, 5, bias=False)})
    module["head"].weight = module["embedding"].weight
    found = dict(deepspeed_zero.gathered(module.state_dict(keep_vars=True)))
    assert found["head.weight"] is found["embedding.weight"]
    assert torch.equal(found["head.weight"], module["head"].weight)
    assert found["head.weight"].data_ptr() != module["head"].weight.data_ptr()


def test_models_with_other_names_in_their_checkpoints_are_gathered_whole(tmp_path):
    """A mixture of experts: its checkpoint's tensors are made of all experts of a layer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "vocab_size": 64}
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
    for family, fields, renamed in (("llama", {}, False), ("qwen3_moe", experts, True)):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes, **fields))
        policy = SimpleNamespace(module=SimpleNamespace(model=model))
        assert _is_renamed(policy.module.model) is renamed

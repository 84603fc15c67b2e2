"""Wrong input ends with exit code 2 and a message that names the flag and the remedy, before any model is loaded."""

from __future__ import annotations

import json
import math
import os
import resource
import shlex
import shutil
import subprocess
from pathlib import Path

import evaluate
import pytest
from helpers import ROOT, VERIFIERS, clean_environment, script, tiny_args

import grpo
import ppo
from grpo import Args
from runtime.arguments import checks, flags, values
from runtime.run import directory, logger, preflight
from runtime.system import process
from runtime.training import model_files
from runtime.training.memory import default_sizes

WEIGHTS = "model.safetensors"
NO_TENSORS = "\2\0\0\0\0\0\0\0{}"  # a safetensors file without any
LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22\nsize 98\n"
FLASH = {"attn_implementation": "flash_attention_2"}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with problems in a file and a model that has every file but real weights."""
    folder = tmp_path_factory.mktemp("input")
    rows = [{"question": f"{i} + 1 =", "answer": str(i + 1)} for i in range(40)]
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "empty_prompt.jsonl").write_text(json.dumps({"question": "", "answer": "1"}) + "\n")
    (folder / "no_truth.jsonl").write_text(json.dumps({"question": "1 + 1 ="}) + "\n")
    (folder / "broken.jsonl").write_text('{"question": "1 + 1 =",\n')
    (folder / "broken.json").write_text('[{"question": "1 + 1 ="')
    config, tokenizer = {"max_position_embeddings": 2048}, {"chat_template": "{{ messages[0]['content'] }}"}
    for name, files in {
        "model": {"config.json": config, WEIGHTS: NO_TENSORS, "tokenizer_config.json": tokenizer},
        "no_weights": {"config.json": config, "tokenizer_config.json": tokenizer},
        "no_config": {WEIGHTS: NO_TENSORS, "tokenizer_config.json": tokenizer},
        "no_template": {"config.json": config, WEIGHTS: NO_TENSORS, "tokenizer_config.json": {}},
        "empty": {},
        "pointer": {"config.json": config, WEIGHTS: LFS_POINTER, "tokenizer_config.json": tokenizer},
        "empty_weights": {"config.json": config, WEIGHTS: "", "tokenizer_config.json": tokenizer},
        "half_a_copy": {"config.json": config, WEIGHTS: NO_TENSORS[:9], "tokenizer_config.json": tokenizer},
        "page": {"config.json": config, WEIGHTS: "<!doctype html>\n", "tokenizer_config.json": tokenizer},
    }.items():
        (folder / name).mkdir()
        for file, content in files.items():
            (folder / name / file).write_text(content if file == WEIGHTS else json.dumps(content))
    shutil.copytree(folder / "model", folder / "tokenizer_pointer")
    (folder / "tokenizer_pointer" / "tokenizer.json").write_text(LFS_POINTER)
    return folder


@pytest.fixture
def nothing_is_loaded(monkeypatch):
    """Fails the test when main gets as far as importing torch's users: all errors here come before that."""

    def reached(*_: str) -> None:
        raise AssertionError("main went on to load tokenizer and model")

    monkeypatch.setattr(process, "prepare_environment", reached)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")


def start(args: Args) -> None:
    """Start as ``python grpo.py`` does with these arguments."""
    grpo.main(args, grpo.preflight(args))


def refusal(args: Args, capsys) -> str:
    """The message with which a run of these arguments ends."""
    with pytest.raises(SystemExit) as end:
        start(args)
    assert end.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1, "one line, no traceback"
    return message


def arguments(place: Path, changes: dict) -> Args:
    """Arguments that are fine but for ``changes``; PLACE in a text stands for the folder."""
    usual = {"model_name_or_path": "PLACE/model", "dataset": "PLACE/problems.jsonl", "eval_prompts": 8}
    usual |= {"output_dir": "PLACE/runs", **changes}
    return Args(**{k: v.replace("PLACE", str(place)) if isinstance(v, str) else v for k, v in usual.items()})


def test_the_usual_arguments_are_not_refused(place, nothing_is_loaded):
    """Else every case below would pass for the wrong reason."""
    with pytest.raises(AssertionError, match="went on"):
        start(arguments(place, {}))


@pytest.mark.parametrize(
    "name, value, flag, changes",
    [
        ("DEEPSPEED_ZERO_STAGE", "3", "zero_stage", {"zero_stage": 3}),
        ("GRADIENT_CLIPPING", "0.1", "max_grad_norm", {"max_grad_norm": 0.1}),
        ("MIXED_PRECISION", "fp16", "dtype", {"dtype": "float16"}),
        ("DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "cpu", "offload", {"offload": ("optimizer",)}),
        ("DEEPSPEED_CONFIG_FILE", "ds.json", "zero_stage", None),
    ],
)
def test_what_a_launcher_configures_without_effect_is_refused(monkeypatch, refused, name, value, flag, changes):
    """As in scripts/zero2.yaml, or a file of `accelerate config`; what the flags say as well is accepted."""
    monkeypatch.setenv(f"ACCELERATE_{name}", value)
    said = refused(checks.check, grpo.Args(), 1)
    assert f"to {value}, which has no effect: leave it out there, and see --{flag}" in said
    if changes is not None:
        checks.check(grpo.Args(**changes), 1)
    monkeypatch.setenv(f"ACCELERATE_{name}", "none")
    checks.check(grpo.Args(), 1)


def test_a_program_that_does_not_train_takes_the_flags_that_every_run_has(place):
    """Evaluating a model has no script, and so no --exp_name: the checks ask for none."""
    checks.check(evaluate.Args(model_name_or_path=str(place / "model"), output_dir=str(place / "runs")), 1)
    model_files.check_model(evaluate.Args(model_name_or_path=str(place / "model"), output_dir=str(place / "runs")))


def test_a_dry_run_needs_no_weights(place, nothing_is_loaded):
    """It can be made where only config and tokenizer are; the run itself rejects (below)."""
    with pytest.raises(AssertionError, match="went on"):
        start(arguments(place, {"model_name_or_path": "PLACE/no_weights", "dry_run": True}))


CASES = {
    # sizes
    "more mini-batches than prompts": (
        {"num_unique_prompts_rollout": 8, "num_mini_batches": 9},
        ["--num_mini_batches 9", "--num_unique_prompts_rollout 8"],
    ),
    "episodes below a step": (
        {"total_episodes": 63},
        ["--total_episodes 63", "the 64 samples of one step"],
    ),
    "an empty stop string": ({"stop_strings": ("a", "")}, ["--stop_strings: is empty (an unset shell variable?)"]),
    "no epoch": ({"total_epochs": 0}, ["--total_epochs 0", "above 0"]),
    "episodes and epochs": ({"total_episodes": 640, "total_epochs": 2}, ["--total_episodes", "--total_epochs"]),
    "a step and a half of warm-up": ({"warmup_steps": 1.5}, ["--warmup_steps 1.5", "must be integers", "fraction"]),
    "a negative warm-up": ({"warmup_steps": -0.1}, ["--warmup_steps -0.1", "0 or more"]),
    "a beta of Adam above 1": ({"adam_betas": (0.9, 1.1)}, ["--adam_betas (0.9, 1.1)", "between 0 and 1"]),
    "a fraction above 1": ({"lr_min_ratio": 1.5}, ["--lr_min_ratio 1.5", "between 0 and 1"]),
    "a filter of all problems": ({"dataset_filter": (1.0, 0.5)}, ["--dataset_filter (1.0, 0.5)", "below 1"]),
    "a filter of none": ({"dataset_filter": (0.5, 0.0)}, ["--dataset_filter (0.5, 0.0)", "THRESHOLD above 0"]),
    "a penalty that pays": ({"non_stop_penalty": -1.0}, ["--non_stop_penalty -1.0"]),
    "a length of no reward model": ({"reward_model_max_length": 9}, ["--reward_model_max_length needs --reward_model"]),
    "group of one": ({"num_samples_per_prompt_rollout": 1}, ["--num_samples_per_prompt_rollout 1", "at least 2"]),
    "micro-batch too small": (
        {"micro_batch_tokens": 287},
        ["--micro_batch_tokens 287", "288 tokens"],
    ),
    **{
        f"{name} zero": ({name: 0}, [f"--{name} 0", "above 0"])
        for name in (
            *("num_unique_prompts_rollout", "num_samples_per_prompt_rollout", "num_mini_batches", "num_epochs"),
            *("total_steps", "max_prompt_length", "max_response_length", "temperature", "learning_rate"),
            *("call_timeout", "eval_samples", "vllm_tensor_parallel_size"),
        )
    },
    # data
    "unknown file": ({"dataset": "PLACE/nothing.jsonl"}, ["--dataset", "nothing.jsonl", ".parquet", "hub id"]),
    "unknown hub set": ({"dataset": "nobody/nothing"}, ["--dataset nobody/nothing", "'train'", "reasoning_gym:NAME"]),
    "unknown task": ({"dataset": "reasoning_gym:nothing"}, ["--dataset reasoning_gym:nothing", "form: reasoning_gym:"]),
    "unknown task option": ({"dataset": "reasoning_gym:chain_sum?colour=1"}, ["colour", "form: reasoning_gym:"]),
    "task option of no value": ({"dataset": "reasoning_gym:chain_sum?size"}, ["--dataset", "?key=value"]),
    "impossible task option": ({"dataset": "reasoning_gym:chain_sum?min_terms=0"}, ["min_terms", "--dataset"]),
    "broken jsonl": ({"dataset": "PLACE/broken.jsonl"}, ["--dataset", "not valid jsonl", "line 1"]),
    "broken json": ({"dataset": "PLACE/broken.json"}, ["--dataset", "not valid json"]),
    "unknown prompt column": ({"prompt_key": "problem"}, ["--prompt_key problem", "question, answer"]),
    "unknown truth column": ({"ground_truth_key": "truth"}, ["--ground_truth_key truth", "question, answer"]),
    "empty prompt": ({"dataset": "PLACE/empty_prompt.jsonl"}, ["row 0", "empty 'question'", "repair"]),
    "too few problems": (
        {"eval_prompts": 33},
        ["40 distinct problems", "--eval_prompts 33", "leaves 7", "--num_unique_prompts_rollout 8"],
    ),
    "too few beside evaluation data": (
        {"eval_dataset": "PLACE/problems.jsonl", "eval_prompts": 33},
        ["has 7 distinct problems that are not evaluated on, fewer than --num_unique_prompts_rollout 8"],
    ),
    "no truths for a verifier": (
        {"dataset": "PLACE/no_truth.jsonl"},
        ["--ground_truth_key answer", "it has: question\n"],
    ),
    # model
    "missing folder": (
        {"model_name_or_path": "PLACE/nothing"},
        ["--model_name_or_path", "give a local folder or a hub id"],
    ),
    "no weights": ({"model_name_or_path": "PLACE/no_weights"}, ["--model_name_or_path", "no weights", "safetensors"]),
    "weights by Git LFS": ({"model_name_or_path": "PLACE/pointer"}, ["--model_name_or_path", "git lfs pull"]),
    "a tokenizer by Git LFS": (
        {"tokenizer_name_or_path": "PLACE/tokenizer_pointer"},
        ["--tokenizer_name_or_path", "git lfs pull"],
    ),
    **{
        name: (
            {"model_name_or_path": f"PLACE/{name}", "dry_run": True},
            ["--model_name_or_path", f"/{name}: model.safetensors is empty or only a part", "copy it again"],
        )
        for name in ("empty_weights", "half_a_copy", "page")
    },
    "template variables are not JSON": (
        {"chat_template": "{enable_thinking: false}"},
        ["--chat_template: not valid JSON", "for example"],
    ),
    "a template variable twice": (
        {"chat_template": '{"enable_thinking": true, "enable_thinking": false}'},
        ["--chat_template", "is there twice"],
    ),
    "a template variable in quotes": (
        {"chat_template": '{"enable_thinking": "False"}'},
        ["--chat_template: enable_thinking", "without quotes"],
    ),
    "a template variable of ours": (
        {"chat_template": '{"add_generation_prompt": false}'},
        ["--chat_template: add_generation_prompt", "drop it"],
    ),
    "no config": ({"model_name_or_path": "PLACE/no_config"}, ["--model_name_or_path", "no config.json", "hub id"]),
    "no template": ({"model_name_or_path": "PLACE/no_template"}, ["--chat_template", "chatml", "question_answer"]),
    "unknown template": ({"chat_template": "nothing"}, ["--chat_template nothing", "chatml", "file"]),
    "context too short": (
        {"max_prompt_length": 1200, "max_response_length": 1200, "micro_batch_tokens": 9999},
        ["--max_prompt_length 1200", "2048", "shorten"],
    ),
    "revision of a folder": ({"model_name_or_path": "PLACE/model@v2"}, ["--model_name_or_path", "drop @v2"]),
    "context overridden": ({"override_config": '{"max_position_embeddings": 100}'}, ["288", "100", "shorten"]),
    "another type of the head": ({"override_config": '{"head_dtype": "float16"}'}, ["head_dtype 'float16'", "float32"]),
    "dropout": ({"override_config": '{"attention_dropout": 0.3}'}, ["attention_dropout 0.3", "without dropout"]),
    "dropout of a part": ({"override_config": '{"text_config": {"resid_pdrop": 0.1}}'}, ["resid_pdrop 0.1"]),
    "override is no object": ({"override_config": "[1]"}, ["--override_config", "JSON object"]),
    # sampling and engine
    "nothing to train": ({"ignore_eos": True}, ["--ignore_eos", "--no-mask_truncated_completions"]),
    "stop strings without vLLM": ({"rollout": "hf", "stop_strings": ("\n",)}, ["--stop_strings", "--rollout vllm"]),
    "turns without an environment": ({"max_turns": 7}, ["--max_turns 7 has no effect", "drop --max_turns"]),
    "an argument of vLLM that is below 1": ({"vllm_args": '{"max_num_seqs": 0}'}, ["--vllm_args: max_num_seqs 0"]),
    "no argument of vLLM": ({"vllm_args": '{"max_num_seq": 7}'}, ["vLLM has no argument max_num_seq;", "max_num_seqs"]),
    **{
        f"a share of the GPU's memory for vLLM of {share}": (
            {"vllm_args": f'{{"gpu_memory_utilization": {share}}}'},
            [f"--vllm_args: gpu_memory_utilization {text}: must be a number above 0 and at most 1"],
        )
        for share, text in (("0.0", "0.0"), ("1.5", "1.5"), ('"0.5"', "'0.5'"))
    },
    **{
        f"an argument of vLLM that is set: {name}": (
            {"vllm_args": json.dumps({name: 1})},
            [f"--vllm_args: {name} is set by {setter}; leave it out"],
        )
        for name, setter in checks.VLLM_TAKEN.items()
    },
    "dedicated, hf": ({"vllm_engines": 1, "rollout": "hf"}, ["--vllm_engines needs --rollout vllm"]),
    "dedicated, asleep": ({"vllm_engines": 1, "vllm_sleep": "engine"}, ["--vllm_engines", "drop one"]),
    "no trainer": ({"vllm_engines": 1}, ["--vllm_engines 1", "--num_processes 2"]),
    "tensor parallel": ({"vllm_tensor_parallel_size": 2}, ["--vllm_tensor_parallel_size 2", "must divide the 1 rank"]),
    "flash attention, shared rows": (
        {**FLASH, "batch_layout": "shared"},
        ["--attn_implementation flash", "--batch_layout packed"],
    ),
    "varlen, shared rows": (
        {"attn_implementation": "varlen", "batch_layout": "shared"},
        ["--attn_implementation", "--batch_layout packed"],
    ),
    "varlen, fp32": ({"attn_implementation": "varlen", "dtype": "float32"}, ["--dtype float32", "bfloat16", "sdpa"]),
    "flash attention, fp32": (
        {**FLASH, "batch_layout": "packed", "dtype": "float32"},
        ["--dtype float32", "bfloat16", "--attn_implementation sdpa"],
    ),
    "sleep with ZeRO 3": (
        {"vllm_sleep": "all", "zero_stage": 3, "rollout": "hf"},
        ["--vllm_sleep all", "--zero_stage 2", "stage 3"],
    ),
    "sleep ahead of training": (
        {"vllm_sleep": "all", "async_steps": 1, "rollout": "hf"},
        ["--vllm_sleep", "--async_steps", "one of them"],
    ),
    "offload without ZeRO 3": ({"offload": ("param",)}, ["--offload param", "--zero_stage 3", "stage 2 has all"]),
    # verifiers
    "unknown verifier": ({"verifier": "maths"}, ["--verifier", "'maths'", "last_number", "exact"]),
    "no reward model to be alone": ({"verifier": "reward_model"}, ["give --reward_model_name_or_path"]),
    "unknown verifier file": ({"verifier": "nothing.py:score"}, ["--verifier", "no file 'nothing.py'", "'score'"]),
    "a verifier file without .py": ({"verifier": "PLACE/problems.jsonl:score"}, ["--verifier", "problems.jsonl.py"]),
    "unknown function": ({"verifier": f"{VERIFIERS}:nothing"}, ["--verifier", "no function 'nothing'"]),
    "weights": ({"reward_weights": ("math",)}, ["--reward_weights", "'math'", "NAME=NUMBER"]),
    "weight of nothing": ({"reward_weights": ("maths=1",)}, ["--reward_weights", "'maths'", "last_number"]),
    "reward model as gate": ({"reward_weights": ("reward_model=gate",)}, ["--reward_weights reward_model=gate"]),
    "overlong buffer": ({"overlong_buffer": 32}, ["--overlong_buffer 32", "--max_response_length 32"]),
    # the algorithm
    "lower clip": ({"clip_lower": 1.0}, ["--clip_lower 1.0", "[0, 1)"]),
    "lower clip negative": ({"clip_lower": -0.1}, ["--clip_lower -0.1"]),
    "upper clip": ({"clip_higher": -0.2}, ["--clip_higher -0.2", "must be 0 or more"]),
    "dual clip": ({"clip_ratio_c": 1.0}, ["--clip_ratio_c 1.0", "above 1"]),
    "mask without 1": ({"importance_sampling_mask": (1.5, 5.0)}, ["--importance_sampling_mask (1.5, 5.0)", "0.5 5"]),
    "mask turned round": ({"importance_sampling_mask": (5.0, 0.5)}, ["--importance_sampling_mask", "LOW", "HIGH"]),
    "mask without an end": ({"importance_sampling_mask": (0.5, math.inf)}, ["--importance_sampling_mask", "HIGH"]),
    # KL
    "negative beta": ({"beta": -0.1}, ["--beta -0.1", "0 or more"]),
    "adaptive without KL": ({"kl_target": (6.0,)}, ["--kl_target", "--beta"]),
    "adaptive without place": (
        {"kl_target": (6.0,), "beta": 0.1, "kl_placement": "none"},
        ["--kl_target", "--kl_placement"],
    ),
    "adaptive, short horizon": ({"kl_target": (6.0, 12.0), "beta": 0.1}, ["--kl_target 6 12", "above 12.8"]),
    "coefficient of no reward": ({"beta": 0.1, "kl_reward_coef": 0.1}, ["--kl_reward_coef", "is loss", "both"]),
    "estimator of no reward": (
        {"kl_reward_estimator": "k2", "kl_placement": "none"},
        ["--kl_reward_estimator", "none"],
    ),
    "two coefficients in one place": (
        {"beta": 0.1, "kl_reward_coef": 0.2, "kl_placement": "reward"},
        ["--beta", "--kl_reward_coef", "--kl_placement reward", "pass one"],
    ),
    "adaptive, reward's coefficient zero": (
        {"kl_target": (6.0,), "beta": 0.1, "kl_reward_coef": 0.0, "kl_placement": "both"},
        ["--kl_target needs --kl_reward_coef or --beta", "above 0"],
    ),
    # places
    "a run's name from a variable that is not set": ({"run_name": "", "overwrite": True}, ["--run_name ''"]),
    "the folder of all runs": ({"run_name": "./.", "overwrite": True}, ["--run_name './.'", "in --output_dir"]),
    "a blank": ({"run_name": " "}, ["--run_name ' '"]),
    "the folder above": ({"run_name": "..", "overwrite": True}, ["--run_name '..'", "in --output_dir"]),
    "no experiment": ({"exp_name": ""}, ["--exp_name ''", "in --output_dir"]),
    "a name of many letters": ({"run_name": "名" * 86}, ["--run_name: has 258 bytes", "at most 255"]),
    "an experiment of many letters": ({"exp_name": "é" * 51}, ["--exp_name: has 102 bytes", "at most 100"]),
    "no folder of runs": ({"output_dir": ""}, ["--output_dir: is empty", "unset shell variable"]),
    "a home that no shell has replaced": ({"output_dir": "~/runs"}, ["--output_dir ~/runs", "not expanded"]),
    "a home in a list": ({"dataset": "a.jsonl, ~/b.jsonl"}, ["--dataset a.jsonl, ~/b.jsonl", "absolute path"]),
    "a variable that is not set": ({"eval_dataset": ""}, ["--eval_dataset: is empty", "drop the flag"]),
    "one of several is not set": ({"reward_weights": ("math=1", "")}, ["--reward_weights: is empty"]),
    "a line of Windows": ({"run_name": "mine\r"}, ["--run_name 'mine\\r'", "dos2unix"]),
    "below a file": ({"output_dir": "PLACE/broken.json/runs"}, ["broken.json cannot be written", "another folder"]),
    "not writable": ({"output_dir": "/proc/runs"}, ["/proc cannot be written", "choose another folder"]),
    "a negative seed": ({"seed": -1}, ["--seed -1", "0 or more"]),
    "a seed beyond NumPy's": ({"seed": 2**31}, ["--seed 2147483648", "below"]),
    "reward's coefficient negative": ({"kl_reward_coef": -0.1, "kl_placement": "both"}, ["--kl_reward_coef -0.1"]),
    "reference moves without beta": ({"ref_policy_update": (5, 1.0)}, ["--ref_policy_update", "--beta 0"]),
    "reference moves without place": (
        {"ref_policy_update": (5, 1.0), "beta": 0.1, "kl_placement": "none"},
        ["--ref_policy_update", "--kl_placement none"],
    ),
    **{
        f"a reference that moves by {update}": (
            {"ref_policy_update": update, "beta": 0.1},
            [f"--ref_policy_update {update[0]} {update[1]:g}: FREQ must be 1 or more, and ALPHA above 0"],
        )
        for update in ((0, 0.5), (1, 0.0), (1, 1.5))
    },
}


@pytest.mark.parametrize("case", CASES)
def test_refused(case, place, nothing_is_loaded, capsys, monkeypatch):
    changes, words = CASES[case]

    import datasets

    load = datasets.load_dataset

    def offline(name: str, *rest: object, **more: object):
        if "data_files" not in more:
            raise ConnectionError("no network in tests")
        return load(name, *rest, **more)

    monkeypatch.setattr(datasets, "load_dataset", offline)
    message = refusal(arguments(place, changes), capsys)
    for word in words:
        assert word in message


def test_a_number_of_steps_and_one_of_epochs_are_refused(place, capsys):
    """Where both are on the command line: a default of steps is no choice."""
    words = ["--total_epochs", "2", "--model_name_or_path", str(place / "model")]
    assert "--total_epochs and --total_steps both set" in refusal(
        flags.parse(Args, words=[*words, "--total_steps", "5"]), capsys
    )


def test_tensor_parallel_divides_the_ranks(place, nothing_is_loaded, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert "--vllm_tensor_parallel_size 3" in refusal(arguments(place, {"vllm_tensor_parallel_size": 3}), capsys)


@pytest.mark.parametrize("local_rank, speaks", [("1", False), ("0", True)])
def test_one_rank_of_a_node_speaks(place, nothing_is_loaded, capsys, monkeypatch, local_rank, speaks):
    """One rank per node reports an error, since it may exist on one node only."""
    monkeypatch.setenv("RANK", "9")
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    with pytest.raises(SystemExit) as end:
        start(arguments(place, {"beta": -1.0}))
    assert end.value.code == 2
    assert ("--beta -1.0" in capsys.readouterr().err) == speaks


def test_dedicated_engines_leave_a_trainer(place, nothing_is_loaded, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    changes = {"vllm_engines": 2, "vllm_tensor_parallel_size": 2}
    message = refusal(arguments(place, changes), capsys)
    assert "--vllm_engines 2 of 2 rank(s) each leave no trainer in a launch of 4" in message
    assert "--num_processes 5" in message


@pytest.fixture
def as_rank(monkeypatch):
    """A function that has the environment of a rank; the test's end undoes what the rank makes of it, too."""

    def become(rank: int, size: int, on_node: int) -> None:
        for name in ("LAUNCH_WORLD_SIZE", "LAUNCH_LOCAL_WORLD_SIZE"):
            monkeypatch.setenv(name, "")
        ranks = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": on_node, "RANK": rank, "LOCAL_RANK": rank % on_node}
        for name, value in ranks.items():
            monkeypatch.setenv(name, str(value))

    return become


def test_what_a_rank_sees_of_a_launch_with_engines(as_rank, monkeypatch):
    """Two nodes of four ranks, three ranks sample: each node's trainers are a launch of five, of four and one."""
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    for rank in range(8):
        as_rank(rank, size=8, on_node=4)
        assert process.split_launch(1, 3) == (5 if rank < 5 else 0)
        assert process.launch_size() == 8 and process.several_nodes()
        if rank < 5:
            assert (os.environ["WORLD_SIZE"], os.environ["LOCAL_WORLD_SIZE"]) == ("5", "4" if rank < 4 else "1")


def test_a_revision_is_looked_for_where_its_model_is(place, monkeypatch):
    """ID@REVISION of the hub; a folder may have an @ in its name, and the critic has a revision of its own."""
    import huggingface_hub

    asked = []

    def download(name: str, file: str, revision: str | None) -> str:
        asked.append((name, file, revision))
        return str(place / "model" / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    args = ppo.Args(model_name_or_path="me/model@v1", critic=("model_name_or_path=me/critic@v2",))
    model_files.check_model(args)
    ppo.check_args(args)
    assert asked == [("me/model", "config.json", "v1"), ("me/critic", "config.json", "v2")]
    shutil.copytree(place / "model", place / "model@home", dirs_exist_ok=True)
    model_files.check_model(ppo.Args(model_name_or_path=str(place / "model@home")))
    assert len(asked) == 2


@pytest.mark.parametrize("visible, shown", [(None, "2"), ("4,5,6,7", "6"), ("", "")])
def test_an_engine_of_one_rank_sees_its_own_gpu(as_rank, monkeypatch, visible, shown):
    """vLLM would take the first that it sees. An engine of several ranks places its own, a trainer its LOCAL_RANK's."""
    for shards, rank in ((1, 2), (1, 1), (2, 2)):
        as_rank(rank, size=4, on_node=4)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        process.split_launch(2 // shards, shards)
        alone = shards == 1 and rank == 2
        assert os.environ.get("CUDA_VISIBLE_DEVICES") == (shown if alone else visible)
        assert os.environ["LOCAL_RANK"] == ("0" if alone and visible != "" else str(rank))


def test_an_engine_of_ppo_has_nothing_to_wait_for(as_rank, place, monkeypatch):
    """And signals are listened to before anything is read: an early SIGTERM must not be lost."""
    as_rank(1, size=2, on_node=2)
    calls = []
    monkeypatch.setattr(process, "listen_for_signals", lambda: calls.append("signals"))
    monkeypatch.setattr(checks, "check", lambda *rest: calls.append("flags"))
    changes = {"vllm_engines": 1, "dry_run": True}
    usual = arguments(place, changes)
    names = ("model_name_or_path", "dataset", "eval_prompts", "output_dir", *changes)
    with pytest.raises(SystemExit) as end:
        ppo.preflight(ppo.Args(**{name: getattr(usual, name) for name in names}))
    assert end.value.code == 0 and calls == ["signals", "flags"]


@pytest.mark.parametrize("finished", [False, True])
def test_an_engine_has_nothing_to_wait_for(as_rank, place, nothing_is_loaded, monkeypatch, finished):
    """Its trainers end at once after --dry_run, or where the run is finished, and nobody else would tell it."""
    changes = {"seed": 11, "vllm_engines": 1}
    as_rank(1, size=2, on_node=2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(directory, "unfinished", lambda folder, args: not finished)
    if finished:
        earlier_run(place, changes)
    with pytest.raises(SystemExit) as end:
        start(arguments(place, changes if finished else {**changes, "dry_run": True}))
    assert end.value.code == 0


@pytest.mark.parametrize(("engines", "shards", "shown"), [(1, 2, "4,5,6,7"), (2, 1, "6")])
def test_a_start_takes_engines_and_their_ranks_for_what_they_are(
    as_rank, place, nothing_is_loaded, monkeypatch, engines, shards, shown
):
    """Rank 2 of 4 is the first of one engine's two ranks, or an engine alone, which sees its own GPU only."""
    as_rank(2, size=4, on_node=4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    changes = {"vllm_engines": engines, "vllm_tensor_parallel_size": shards, "dry_run": True}
    with pytest.raises(SystemExit) as end:
        start(arguments(place, changes))
    assert end.value.code == 0 and os.environ["CUDA_VISIBLE_DEVICES"] == shown


# ---------------------------------------------------------------------------------------- folders of earlier runs


def earlier_run(place: Path, changes: dict) -> None:
    args = arguments(place, changes)
    folder, _ = directory.open_run(args, Args())
    logger.RunLog(folder, args, 1, args.total_steps, True).close()


def test_overwrite_leaves_the_users_files(place, nothing_is_loaded, tmp_path):
    """Notes, and a run of its own, in the folder of the run; or alone in the folder that a first run is to have."""
    changes = {"output_dir": str(tmp_path), "run_name": "mine"}
    folder = tmp_path / "mine"
    own = {"notes.txt": "mine", "model.txt": "", "plots/curves.png": "", "other/config.json": '{"args": {}}'}
    for file, text in own.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text)
    earlier_run(place, {**changes, "overwrite": True})
    for file in ("metrics.jsonl", "curves.png", "model/config.json", "model.aside/config.json", "wandb/latest"):
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text("")
    earlier_run(place, {**changes, "overwrite": True})
    left = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert left == {*own, "config.json", "lock"}
    assert all((folder / file).read_text() == text for file, text in own.items())


@pytest.mark.parametrize("name", ["model", "torn", "data"])
def test_a_folder_that_holds_no_run_is_not_touched(place, nothing_is_loaded, tmp_path, capsys, name):
    """A model, a run whose config.json is torn; without --overwrite, data that is named as ours."""
    contents = {
        "model": {"config.json": '{"model_type": "llama"}', "model.safetensors": ""},
        "torn": {"config.json": "", "metrics.jsonl": '{"step": 1}'},
        "data": {"samples.jsonl": '{"question": "1 + 1"}'},
    }[name]
    for file, text in contents.items():
        path = tmp_path / "there" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    place_of_it = {"output_dir": str(tmp_path), "run_name": "there"}
    message = refusal(arguments(place, {**place_of_it, "overwrite": name != "data"}), capsys)
    assert "there is not the folder of a run" in message and "choose another --run_name" in message
    assert {str(f.relative_to(tmp_path / "there")) for f in tmp_path.rglob("*") if f.is_file()} == set(contents)


def test_an_overwriting_that_was_cut_short_can_be_repeated(place, nothing_is_loaded, tmp_path, monkeypatch):
    """config.json goes last, so what is left is still known as a run's."""
    changes = {"output_dir": str(tmp_path), "run_name": "mine"}
    earlier_run(place, changes)
    for file in ("bad_batch.jsonl", "metrics.jsonl"):
        (tmp_path / "mine" / file).write_text("")
    plain = Path.unlink
    removed = []

    def killed(path: Path) -> None:
        if len(removed) == 2:
            raise KeyboardInterrupt
        removed.append(path.name)
        plain(path)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "unlink", killed)
        earlier_run(place, {**changes, "overwrite": True})
    assert sorted(removed) == ["bad_batch.jsonl", "metrics.jsonl"]
    with pytest.raises(AssertionError, match="went on"):
        start(arguments(place, {**changes, "overwrite": True}))


def test_folder_of_another_run(place, nothing_is_loaded, capsys):
    earlier_run(place, {"run_name": "mine"})
    message = refusal(arguments(place, {"run_name": "mine", "beta": 0.25}), capsys)
    for word in ("another configuration", "--beta 0.0 there, 0.25 here", "--run_name"):
        assert word in message


def test_the_same_run_again(place, nothing_is_loaded, capsys):
    earlier_run(place, {"seed": 7})
    never = {"seed": 7, "resume": "never"}
    message = refusal(arguments(place, never), capsys)
    assert "already contains this run" in message and "--overwrite" in message
    message = refusal(arguments(place, {**never, "log_samples": 1}), capsys)  # shown otherwise, still the same run
    assert "already contains this run" in message
    with pytest.raises(AssertionError, match="went on"):  # it had not made a step, so nothing is lost
        start(arguments(place, {"seed": 7}))
    with pytest.raises(AssertionError, match="went on"):
        start(arguments(place, {"seed": 7, "overwrite": True}))
    both = {"seed": 7, "overwrite": True, "resume": "runs/other/checkpoints/step_000010"}
    assert "--overwrite starts from scratch" in refusal(arguments(place, both), capsys)


# ----------------------------------------------------------------------------------------- what needs the tokenizer


def test_filtered_down_to_too_few(tiny, tmp_path, capsys):
    args = tiny_args(tiny, tmp_path, max_prompt_length=3, overlong_prompts="drop", rollout="hf")
    assert "left by --overlong_prompts drop" in refusal(args, capsys)


def test_long_prompts(tiny, tmp_path, capsys, monkeypatch):
    from runtime.training import pretrained

    def load_model(*_: object) -> None:
        raise SystemExit("a model was loaded")  # any other exception would make the run leave by os._exit

    monkeypatch.setattr(pretrained, "load_model", load_model)
    rows = [{"question": "one " * (90 if i == 3 else 2) + str(i), "answer": "1"} for i in range(20)]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {"dataset": "PLACE/long.jsonl", "model_name_or_path": str(tiny), "max_prompt_length": 60}
    message = refusal(arguments(tmp_path, changes), capsys)
    for word in ("1 of 12 prompts", "--max_prompt_length 60", "one one", "--overlong_prompts drop"):
        assert word in message
    assert not (tmp_path / "runs").exists()


def test_unknown_field_of_the_config(tiny, capsys):
    """Known only once transformers has built the config; the weights are not read."""
    import torch

    from runtime.training import pretrained

    with pytest.raises(SystemExit) as end:
        pretrained.load_model(
            Args(model_name_or_path=str(tiny), override_config='{"depth": 3}'), torch.float32, "eager"
        )
    assert end.value.code == 2
    message = capsys.readouterr().err
    assert "--override_config" in message and "'depth'" in message


# ------------------------------------------------------------------------------------------------- as a user calls it


def call(*words: str, **environment: str) -> tuple[int, str, str, float]:
    """Run a command in the repository without the test's own variables: (exit code, stdout, stderr, CPU seconds)."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        words,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env=clean_environment() | {"HF_HUB_OFFLINE": "1"} | environment,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return done.returncode, done.stdout, done.stderr, seconds


def imported(err: str) -> set[str]:
    """Top-level modules in the output of ``python -X importtime``."""
    return {
        line.rsplit("|", 1)[1].strip().split(".")[0] for line in err.splitlines() if line.startswith("import time:")
    }


HEAVY = {"torch", "transformers", "vllm", "deepspeed", "accelerate", "datasets", "reasoning_gym"}


@pytest.mark.integration
@pytest.mark.parametrize("words", [("--help",), ("--beta", "-1"), ("--dataset", "nowhere.jsonl")], ids=" ".join)
def test_help_and_refusals_come_before_the_slow_imports(words):
    code, out, err, seconds = call(*script("-X", "importtime", "grpo.py", *words))
    assert code == (0 if words == ("--help",) else 2)
    assert "runtime" in imported(err), "the option was not heeded"
    assert not imported(err) & HEAVY
    if words == ("--help",):
        assert "--kl_estimator" in out and seconds < 3


def test_short_names_of_dtypes():
    for short, name in {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.items():
        assert flags.parse(Args, words=["--dtype", short]).dtype == name
        assert flags.parse(Args, words=[f"--dtype={short}", "--exp_name", short]).dtype == name
    assert flags.parse(Args, words=["--dtype=fp32", "--exp_name", "bf16", "--run_name=fp16"]).exp_name == "bf16"


@pytest.mark.parametrize("line", [
    "--reward_weights exact=0 math=gate --stop_strings a x=c --no-shuffle_mini_batches",
    """--preset verl --beta=0.1 --vllm-args '{"max_num_seqs": 4}' --adam_betas 0.9 0.99 --offload ref optimizer""",
    "--importance_sampling_mask 0.5 5 --seed 2 --verifier file.py:f --system_prompt n=1 --loss_norm token",
])  # fmt: skip
def test_values_of_our_own_flags_are_not_taken_for_words_of_others(line):
    flags.parse(grpo.Args, words=shlex.split(line))


def test_dry_run(tiny, tmp_path, capsys):
    words = ["--dry_run", "--model_name_or_path", str(tiny), "--output_dir", str(tmp_path / "runs"), "--beta", "0.1"]
    words += ["--total_steps", "5", "--num_mini_batches", "2", "--num_epochs", "3"]
    start(flags.parse(Args, words=words))
    out = capsys.readouterr().out
    for line in (
        "8 prompts x 8 samples = 64 samples",
        "2048 new tokens, 6 optimizer step(s)",
        "5 steps, 320 samples, 30 optimizer steps",
        "91 problems",
        "held out",
        "<|im_start|>user\\nState the final answer",
        "KL: 0.1 x k3+ in the loss",
        "rows       shared (masks of at most ",
        "sizes      micro_batch_tokens ",
        ", logprob_chunk 512, ",
        "memory ",
    ):
        assert line in out
    assert "quickstart" not in out
    ids = json.loads(next(line for line in out.splitlines() if line.startswith("ids ")).removeprefix("ids"))
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    shown = next(line for line in out.splitlines() if line.startswith("prompt ")).removeprefix("prompt").strip()
    assert repr(tokenizer.decode(ids)) == shown
    assert not (tmp_path / "runs").exists()


def test_algorithms_as_in_their_papers_leave_no_response_out():
    """GRPO, Dr. GRPO and RLOO train on truncated responses, too; the page's flags say so."""
    page = (ROOT / "docs" / "grpo.md").read_text()
    for name in ("GRPO as in the paper", "Dr. GRPO", "RLOO"):
        (line,) = [line for line in page.splitlines() if line.startswith(f"| {name} |")]
        args = flags.parse(grpo.Args, words=line.split("`")[1].split())
        assert not args.mask_truncated_completions, name


def test_sizes_that_are_left_open_follow_the_device():
    """None is never a size; what is given holds on any device, and a micro-batch holds the longest sample."""
    assert list(vars(default_sizes(Args(), False)).values()) == [512, 512, 0.4, 256, 8192]
    assert list(vars(default_sizes(Args(), True)).values()) == [16384, 4096, 0.4, 1024, 16384]
    own = '{"max_num_seqs": 9, "max_num_batched_tokens": 10, "gpu_memory_utilization": 0.3}'
    given = Args(micro_batch_tokens=7, vllm_args=own)
    for cuda, chunk in ((False, 512), (True, 4096)):
        assert list(vars(default_sizes(given, cuda)).values()) == [7, chunk, 0.3, 9, 10]
    long = default_sizes(Args(max_prompt_length=2000, max_response_length=20000), True)
    assert (long.micro_batch_tokens, long.logprob_chunk) == (22000, 4096)


@pytest.mark.parametrize("script", [grpo, ppo])
def test_a_model_that_is_not_there_is_reported_before_the_data_is_read(script, monkeypatch, capsys, tmp_path):
    """Reading a data set can take minutes; the check of the model's files takes none."""
    monkeypatch.setattr(preflight.problem_set, "load_problems", lambda *rest: pytest.fail("the data was read"))
    args = script.Args(model_name_or_path=str(tmp_path), output_dir=str(tmp_path / "runs"))
    with pytest.raises(SystemExit) as end:
        script.preflight(args)
    assert end.value.code == 2 and "no config.json there" in capsys.readouterr().err


@pytest.mark.parametrize("script", [grpo, ppo])
def test_each_structured_flag_is_parsed_once(script, tiny, tmp_path, monkeypatch):
    """From the checks to the run's directory: a text that is parsed again could be read differently the second time."""
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"question": f"{k} + 1", "answer": str(k + 1)}) + "\n" for k in range(40)))
    texts = {
        "vllm_args": '{"max_num_seqs": 7, "enforce_eager": true}',
        "override_config": '{"rope_theta": 12345.0}',
        "dataset": json.dumps({str(file): 1.0}),
    }
    flags.engine_args.cache_clear()
    parsed = []
    plain = values.json_object
    for module in (values, flags):
        monkeypatch.setattr(module, "json_object", lambda flag, *rest: (parsed.append(flag), plain(flag, *rest))[1])
    places = {"model_name_or_path": str(tiny), "output_dir": str(tmp_path / "runs")}
    small = {"eval_prompts": 4, "num_unique_prompts_rollout": 4, "verifier": "exact", "dry_run": True}
    args = script.Args(**places, **small, **texts)
    assert script.preflight(args) is not None
    assert sorted(parsed) == sorted(f"--{name}" for name in texts)


def test_the_folder_of_runs_is_that_of_the_environment(monkeypatch):
    """A job that is submitted gets RUN_DIR; on the command line the flag wins, as for every default."""
    monkeypatch.delenv("RUN_DIR", raising=False)
    assert Args().output_dir == "runs"
    monkeypatch.setenv("RUN_DIR", "elsewhere")
    assert Args().output_dir == "elsewhere" and Args(output_dir="here").output_dir == "here"

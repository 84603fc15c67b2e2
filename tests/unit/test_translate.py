"""scripts/translate.py: published commands of six frameworks, their keys, values that are computed, and bash's sandbox.

published_commands.toml has the commands, each with its repository and path, the command that must come out, and what
of it was checked by hand. The slow tests run each through --dry_run on data in the framework's own form, and read the
keys of the frameworks' configurations again from their wheels.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import json
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import flags_page
import frameworks
import pyarrow.parquet
import pytest
import transformers
import translate
import translation_input as reading
import translation_rules as rules
import yaml
from helpers import ROOT

from runtime.arguments import flags, presets

PUBLISHED = tomllib.loads((ROOT / "tests" / "published_commands.toml").read_text())["command"]
KINDS = ("equal", "computed", "always", "not here", "renamed")
TABLES = [(name, key) for name in rules.FRAMEWORKS for key in rules.rows(name)]


def translated(words: str | list[str], framework: str = "", gpus: int | None = None) -> rules.Ours:
    """The translation of a command line."""
    command = reading.command_of(shlex.split(words) if isinstance(words, str) else words, framework)
    return translate.translate(command, framework or translate.recognized(command), gpus)


def published(entry: dict, folder: Path) -> rules.Ours:
    """The translation of a published command, as a file of its user's."""
    file = folder / f"theirs.{entry['kind']}"
    file.write_text(entry["text"])
    (command,) = translate.commands_in(str(file), [], "")
    assert translate.recognized(command) == entry["framework"]
    return translate.translate(command, entry["framework"])


# --------------------------------------------------------------------------------------------------- published commands


def ids(entry: dict) -> str:
    return f"{entry['framework']}: {entry['path']}"


@pytest.mark.parametrize("entry", PUBLISHED, ids=ids)
def test_a_published_command_becomes_the_command_that_was_checked(entry, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.chdir(tmp_path)
    line = translate.command_line(published(entry, tmp_path)).replace(str(tmp_path), "/home/me/here")
    assert line == entry["ours"], entry["path"]


def test_there_are_ten_commands_of_each_framework_and_each_says_what_was_checked():
    counts = [sum(entry["framework"] == name for entry in PUBLISHED) for name in rules.FRAMEWORKS]
    assert min(counts) >= 10
    assert all(entry["repository"] and entry["commit"] and len(entry["checked"]) > 10 for entry in PUBLISHED)


def row(framework: str, i: int, prompt: str, truth: str) -> dict:
    """A row in the form of a framework's data."""
    question = f"What is {i} + 1?"
    messages = [{"role": "user", "content": question}]
    if framework in ("verl", "tinyzero"):
        extra = {"ability": "math", "reward_model": {"style": "rule", "ground_truth": str(i + 1)}}
        return {"data_source": "openai/gsm8k", "prompt": messages, "extra_info": {"index": i}} | extra
    if framework == "open-instruct":
        return {"messages": messages, "ground_truth": str(i + 1), "dataset": "gsm8k"}
    if framework == "areal":
        return {"question": question, "answer": f"It is {i + 1}.\n#### {i + 1}"}
    return {prompt: messages if framework == "trl" else question, truth: str(i + 1)}


def write(path: Path, rows: list[dict]) -> None:
    """Write a data set where a command names it, as a Parquet file or a folder saved by datasets."""
    import datasets

    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        datasets.Dataset.from_list(rows).save_to_disk(path)


def furnish(ours: rules.Ours, framework: str, place: Path, tiny: Path, reward_model: Path) -> None:
    """Put a model and data in the framework's form wherever the translated command names them."""
    for flag in ("model_name_or_path", "tokenizer_name_or_path", "reward_model_name_or_path"):
        if flag in ours.flags:
            target = place / str(ours.flags[flag])
            shutil.copytree(reward_model if "reward" in flag else tiny, target, dirs_exist_ok=True)
            config = json.loads((target / "config.json").read_text()) | {"max_position_embeddings": 200_000}
            (target / "config.json").write_text(json.dumps(config))
    wanted: dict[str, int] = {}
    for flag, least in (("dataset", ours.flags["num_unique_prompts_rollout"] + 100), ("eval_dataset", 40)):
        text = str(ours.flags.get(flag, "{}"))
        for name, part in (json.loads(text) if text.startswith("{") else {text: 1.0}).items():
            count = part + 60 if isinstance(part, int) else least
            wanted[name] = wanted.get(name, 0) + count
    first = 0
    for name, count in wanted.items():
        columns = str(ours.flags.get("prompt_key", "prompt")), str(ours.flags.get("ground_truth_key", "solution"))
        write(place / name, [row(framework, first + i, *columns) for i in range(count)])
        first += count


@pytest.fixture(scope="module")
def reward_model(tiny, tmp_path_factory) -> Path:
    """A sequence classifier with one output."""
    folder = tmp_path_factory.mktemp("reward") / "model"
    shutil.copytree(tiny, folder)
    transformers.AutoModelForSequenceClassification.from_pretrained(tiny, num_labels=1).save_pretrained(folder)
    return folder


def dry_run(ours: rules.Ours, monkeypatch) -> None:
    """Run the script of a translated command as a rank of its launch, with --dry_run."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(ours.processes))
    script = importlib.import_module(ours.script)
    args = flags.parse(script.Args, words=[*translate.words_of(ours), "--dry_run"])
    ready = script.preflight(args)
    script.main(dataclasses.replace(args, vllm_tensor_parallel_size=1), ready)  # no device here has shards
    assert not ready[2].exists(), "a dry run leaves nothing"


FIRST = [next(entry for entry in PUBLISHED if entry["framework"] == name) for name in ("trl", "openrlhf")]


def passes(entry: dict, place: Path, monkeypatch, tiny: Path, reward_model: Path) -> None:
    monkeypatch.setenv("HOME", str(place))
    monkeypatch.chdir(place)
    ours = published(entry, place)
    if str(ours.flags.get("output_dir", "")).startswith("/"):
        ours.flags["output_dir"] = "runs"
    for flag in ("dataset", "model_name_or_path", "reward_model_name_or_path"):  # their machines' absolute paths
        if str(ours.flags.get(flag, "")).startswith("/") and str(place) not in str(ours.flags[flag]):
            ours.flags[flag] = str(place) + ours.flags[flag]
    furnish(ours, entry["framework"], place, tiny, reward_model)
    dry_run(ours, monkeypatch)


@pytest.mark.parametrize("entry", FIRST, ids=ids)
def test_a_translated_command_passes_a_dry_run(entry, tmp_path, monkeypatch, tiny, reward_model):
    passes(entry, tmp_path, monkeypatch, tiny, reward_model)


@pytest.mark.slow
@pytest.mark.parametrize("entry", [entry for entry in PUBLISHED if entry not in FIRST], ids=ids)
def test_every_published_command_passes_a_dry_run(entry, tmp_path, monkeypatch, tiny, reward_model):
    passes(entry, tmp_path, monkeypatch, tiny, reward_model)


# ------------------------------------------------------------------------------------------------------------- the keys


def test_every_row_has_a_kind_and_flags_that_exist():
    known = rules.fields("grpo").keys() | rules.fields("ppo").keys()
    known |= {
        "num_processes",
        "num_machines",
        "backend",
        "cluster",
        "workspace",
        "priority",
        "preemptible",
        "max_retries",
    }
    known |= {"budget", "image", "mount", "env", "gpus", "num_nodes", "preset"}  # of accelerate launch and submit.py
    for framework in rules.FRAMEWORKS:
        for entry in rules.rows(framework).values():
            assert entry.kind in KINDS, entry
            if entry.kind == "renamed":
                assert rules.rows(framework)[entry.ours].kind != "renamed", entry
                continue
            assert entry.ours or entry.kind in ("always", "not here"), entry
            assert entry.note or entry.kind in ("equal", "computed"), entry
            assert set(re.findall(r"--(\w+)", entry.ours)) <= known, entry


# What makes a framework read its other keys.
READ_WITH = {
    "verl": {
        "actor_rollout_ref.rollout.val_kwargs.do_sample": True,
        "algorithm.filter_groups.enable": True,
        "algorithm.use_kl_in_reward": True,
        "algorithm.kl_ctrl.type": "adaptive",
        "reward_model.enable": True,
        "custom_reward_function.path": "a.py",
        "reward.custom_reward_function.path": "a.py",
    },
    "tinyzero": {"reward_model.enable": True, "algorithm.kl_ctrl.type": "adaptive"},
    "trl": {"dataset_name": "a", "sync_ref_model": True, "use_vllm": True},
    "open-instruct": {},
    "openrlhf": {"algo.kl.target": 1.0, "eval.dataset": "a"},
    "areal": {},
}


@pytest.mark.parametrize("framework", rules.FRAMEWORKS)
def test_every_computed_key_is_read_by_the_rules_and_every_equal_one_sets_its_flag(framework):
    """A row that promises a computation which no rule makes would be silence about a setting."""
    missing = []
    for key, entry in rules.rows(framework).items():
        if entry.kind not in ("equal", "computed") or key in ("config", "config_name", "config_path"):
            continue
        value = reading.value_of(entry.default)
        value = value if value not in (None, "", [], {}) else 1
        scripts = {"verl": ("grpo", "gae"), "tinyzero": ("grpo", "gae"), "openrlhf": ("group_norm", "gae")}.get(
            framework, ("",)
        )
        used: set[str] = set()
        for kind in scripts:
            given = {"verl": "algorithm.adv_estimator", "openrlhf": "algo.advantage.estimator"}
            start = {given.get(framework, "algorithm.adv_estimator"): kind} if kind else {}
            theirs = rules.Theirs(framework, READ_WITH[framework] | start | {key: value})
            ours = rules.Ours()
            rules.RULES[framework](theirs, ours)
            used |= theirs.used
            translate.copy_equal(theirs, ours)
            if entry.kind == "equal" and entry.ours[2:] in ours.flags:
                used.add(key)
        missing += [] if key in used else [key]
    assert missing == []


def test_no_key_is_matched_by_its_last_component_alone():
    """A name without its path, or with another one, is no key, and is answered as such."""
    for framework, key in TABLES:
        table = rules.rows(framework)
        last = key.rpartition(".")[2]
        for other in ({last, f"other.{key}", f"other.{last}"} if "." in key else {f"other.{key}"}) - table.keys():
            assert translate.row_of(other, table) is None, (framework, other)
    ours = translated("verl.trainer.main_ppo lr=1 mode=async model.path=X data.path=Y wandb.mode=offline", "verl")
    assert ours.relied.keys() >= {"model_name_or_path"} and "track" not in ours.flags and len(ours.absent) == 5


@pytest.mark.parametrize("word, expected", [
    ("actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct", "--model_name_or_path Qwen/Qwen2-7B-Instruct"),
    ("critic.model.path=Qwen/Q", "--critic model_name_or_path=Qwen/Q"),
    ("data.filter_overlong_prompts=True", "--overlong_prompts drop"),
    ("critic.optim.lr_scheduler_type=cosine", "lr_scheduler_type=cosine"),
    ("algorithm.use_kl_in_reward=True", "--beta 0.001 --kl_placement reward"),
])  # fmt: skip
def test_words_that_were_answered_wrongly(word, expected):
    line = translate.command_line(translated(f"python -m verl.trainer.main_ppo {word}"))
    assert expected in line and "--reward_model_name_or_path" not in line


@pytest.mark.parametrize("word", [
    "actor_rollout_ref.rollout.mode=async", "actor_rollout_ref.actor.fsdp_config.param_offload=False",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload=False", "algorithm.use_kl_in_reward=False",
    "trainer.critic_warmup=0", "actor_rollout_ref.rollout.multi_turn.enable=False", "reward_model.enable=False",
    "actor_rollout_ref.actor.use_kl_loss=False", "trainer.val_before_train=True",
])  # fmt: skip
def test_a_setting_that_is_off_changes_nothing(word):
    plain = "python -m verl.trainer.main_ppo algorithm.adv_estimator=gae"
    assert translate.command_line(translated(f"{plain} {word}")) == translate.command_line(translated(plain))


# ----------------------------------------------------------------------------------------------------------- the values

VALUES = [
    (
        "trl",
        "--per_device_train_batch_size 4 --gradient_accumulation_steps 4 --num_generations 8 --num_processes 2",
        {"num_unique_prompts_rollout": 4, "num_samples_per_prompt_rollout": 8, "num_mini_batches": 1},
    ),
    (
        "trl",
        "--per_device_train_batch_size 8 --steps_per_generation 8 --gradient_accumulation_steps 2 --num_processes 2",
        {"num_unique_prompts_rollout": 16, "num_mini_batches": 4},
    ),
    (
        "trl",
        "--generation_batch_size 64 --per_device_train_batch_size 8 --num_generations 16",
        {"num_unique_prompts_rollout": 4, "num_samples_per_prompt_rollout": 16, "num_mini_batches": 4},
    ),
    (
        "trl",
        "--max_steps 100 --steps_per_generation 4 --num_iterations 2 --num_processes 4",
        {"total_steps": 13, "num_epochs": 2},
    ),
    (
        "trl",
        "--loss_type dr_grpo --scale_rewards none",
        {"loss_norm": "constant", "advantage_normalization_type": "centered"},
    ),
    ("trl", "--beta 0.04 --no_use_bias_correction_kl", {"beta": 0.04, "kl_gradient": "naive"}),
    ("trl", "--epsilon 0.1", {"clip_lower": 0.1, "clip_higher": 0.1}),
    ("trl", "--epsilon 0.1 --epsilon_high 0.28", {"clip_lower": 0.1, "clip_higher": 0.28}),
    (
        "trl",
        "--lr_scheduler_type cosine_with_min_lr --warmup_ratio 0.1",
        {"lr_scheduler_type": "cosine", "warmup_steps": 0.1},
    ),
    ("trl", "--sync_ref_model --ref_model_sync_steps 64 --beta 0.1", {"ref_policy_update": [64, 0.6]}),
    (
        "trl",
        "--dataset_name a/b --reward_funcs accuracy_reward think_format_reward --reward_weights 1 0.2",
        {"verifier": "math,format", "reward_weights": ["format=0.2"], "ground_truth_key": "solution"},
    ),
    (
        "trl",
        "--use_vllm --vllm_importance_sampling_mode token_truncate --vllm_importance_sampling_clip_max 2",
        {"truncated_importance_sampling_ratio_cap": 2.0},
    ),
    (
        "trl",
        "--dataset_name openai/gsm8k --dataset_config main --dataset_train_split test",
        {"dataset": "openai/gsm8k:main@test"},
    ),
    (
        "verl",
        "data.train_batch_size=512 actor_rollout_ref.actor.ppo_mini_batch_size=128 algorithm.adv_estimator=grpo",
        {"num_unique_prompts_rollout": 512, "num_samples_per_prompt_rollout": 8},
    ),
    (
        "verl",
        "algorithm.adv_estimator=grpo data.train_batch_size=512 actor_rollout_ref.actor.optim.lr_warmup_steps=10 "
        "actor_rollout_ref.actor.ppo_epochs=2",
        {"warmup_steps": 40, "num_mini_batches": 2, "num_epochs": 2},
    ),
    (
        "verl",
        "algorithm.adv_estimator=rloo actor_rollout_ref.rollout.n=5",
        {"advantage_normalization_type": "leave_one_out", "num_samples_per_prompt_rollout": 5},
    ),
    (
        "verl",
        "algorithm.adv_estimator=grpo actor_rollout_ref.actor.use_kl_loss=True algorithm.use_kl_in_reward=True "
        "algorithm.kl_ctrl.kl_coef=0.01 algorithm.kl_penalty=low_var_kl",
        {"kl_placement": "both", "beta": 0.001, "kl_reward_coef": 0.01, "kl_reward_estimator": "k3"},
    ),
    (
        "verl",
        "algorithm.adv_estimator=grpo actor_rollout_ref.actor.use_kl_loss=True "
        "actor_rollout_ref.actor.kl_loss_type=k2+",
        {"kl_estimator": "k2", "kl_gradient": "unbiased"},
    ),
    (
        "verl",
        "algorithm.use_kl_in_reward=True algorithm.kl_ctrl.type=adaptive algorithm.kl_ctrl.target_kl=0.05",
        {"kl_target": [0.05, 10000.0], "kl_placement": "reward"},
    ),
    (
        "verl",
        "algorithm.adv_estimator=grpo actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean "
        "actor_rollout_ref.actor.clip_ratio_high=0.28",
        {"loss_norm": "sequence", "clip_higher": 0.28},
    ),
    (
        "verl",
        "algorithm.adv_estimator=reinforce_plus_plus algorithm.gamma=0.99",
        {"disable_value": True, "gamma": 0.99},
    ),
    (
        "verl",
        "algorithm.adv_estimator=grpo reward_model.reward_manager=dapo reward_model.overlong_buffer.enable=True "
        "reward_model.overlong_buffer.len=4096",
        {"overlong_buffer": 4096},
    ),
    (
        "verl",
        "algorithm.adv_estimator=grpo actor_rollout_ref.actor.fsdp_config.optimizer_offload=True",
        {"vllm_sleep": "all"},
    ),
    (
        "verl",
        "data.train_files=['a.parquet','b.parquet'] data.val_files=c.parquet",
        {"dataset": '{"a.parquet": 1.0, "b.parquet": 1.0}', "eval_dataset": '{"c.parquet": 1.0}'},
    ),
    (
        "open-instruct",
        "--num_learners_per_node 4 2 --vllm_num_engines 2 --vllm_tensor_parallel_size 1",
        {"vllm_engines": 2, "async_steps": 8, "inflight_updates": "keep"},
    ),
    (
        "open-instruct",
        "--dataset_mixer_list a 1.0 b 64 --dataset_mixer_eval_list c 16 --dataset_mixer_eval_list_splits train",
        {"dataset": '{"a": 1.0, "b": 64}', "eval_dataset": '{"c": 16}', "eval_temperature": 0.0},
    ),
    ("open-instruct", "--kl_estimator 1 --beta 0.01", {"kl_estimator": "k2", "beta": 0.01}),
    (
        "open-instruct",
        "--non_stop_penalty --non_stop_penalty_value -1.0",
        {"mask_no_eos_with_zero": True, "non_stop_penalty": 1.0},
    ),
    (
        "openrlhf",
        "--rollout.batch_size 256 --rollout.n_samples_per_prompt 8 --train.batch_size 512 "
        "--algo.advantage.estimator group_norm",
        {"num_mini_batches": 4, "num_unique_prompts_rollout": 256},
    ),
    (
        "openrlhf",
        "--advantage_estimator rloo --n_samples_per_prompt 4 --init_kl_coef 0.001 --use_kl_loss --kl_estimator k3",
        {"advantage_normalization_type": "leave_one_out", "kl_placement": "loss", "kl_estimator": "k3", "beta": 0.001},
    ),
    (
        "openrlhf",
        "--data.max_len 4096 --rollout.max_new_tokens 1024 --data.input_key q --data.label_key a "
        "--data.apply_chat_template",
        {"max_response_length": 1024, "max_prompt_length": 3072, "prompt_key": "q", "ground_truth_key": "a"},
    ),
    (
        "areal",
        "rollout.backend=vllm:d2t1 actor.backend=fsdp:d6 rollout.max_head_offpolicyness=4 "
        "actor.reward_norm.std_level=null "
        "actor.reward_norm.mean_level=group",
        {"vllm_engines": 2, "async_steps": 4, "inflight_updates": "recompute"},
    ),
    (
        "areal",
        "actor.reward_norm.mean_level=group actor.reward_norm.mean_leave1out=true actor.reward_bias=-0.25",
        {"advantage_normalization_type": "leave_one_out", "reward_bias": 0.25},
    ),
]


@pytest.mark.parametrize("framework, words, expected", VALUES)
def test_values_are_computed(framework, words, expected):
    ours = rules.Ours()
    command = reading.command_of(shlex.split(words), framework)
    ours = translate.translate(command, framework, defaults=False)
    found = {flag: ours.flags.get(flag) for flag in expected}
    if "num_mini_batches" in expected and framework == "verl" and "lr_warmup" in words:
        assert found.pop("num_mini_batches") == 2 and expected["num_mini_batches"] == 2
        expected = {flag: value for flag, value in expected.items() if flag != "num_mini_batches"}
    assert found == expected


def test_defaults_that_the_command_relies_on_are_marked():
    ours = translated("trl grpo --model_name_or_path X --dataset_name Y --reward_funcs accuracy_reward")
    text = translate.blocks(ours, "trl")
    for flag, source in (
        ("max_response_length", "max_completion_length=512"),
        ("total_epochs", "num_train_epochs=3.0"),
    ):
        assert f"--{flag}: from a default that the command leaves out, {source}" in text
    assert "--preset trl: the defaults of trl 1.16.0 that change learning" in text
    assert "--preset trl" in translate.command_line(ours)


# ----------------------------------------------------------------------------------------------------------------- bash

ATTACKS = [
    "/usr/bin/touch {}",
    "touch {}",
    "exec /usr/bin/touch {}",
    "command -p touch {}",
    "\\touch {}",
    "env touch {}",
    "BASH_CMDS[touch]=/usr/bin/touch; touch {}",
    "hash -p /usr/bin/touch t; t {}",
    'eval "/usr/bin/touch {}"',
    "x=$(/usr/bin/touch {})",
    "(builtin exec /usr/bin/touch {})",
    "PATH=/usr/bin touch {}",
    "export PATH=/usr/bin; touch {}",
    "PATH=/usr/bin\ntouch {}",
    "declare -x PATH=/usr/bin; touch {}",
    "unset PATH; touch {}",
    "readonly PATH=/usr/bin; touch {}",
    "echo hi > {}",
    "echo hi >> {}",
    ": >| {}",
    "printf hi &> {}",
    "set +r; /usr/bin/touch {}",
    "shopt -u extdebug; /usr/bin/touch {}",
    "builtin trap - DEBUG; /usr/bin/touch {}",
    "trap - DEBUG; /usr/bin/touch {}",
    "unset -f __before; /usr/bin/touch {}",
    "source /dev/stdin <<< '/usr/bin/touch {}'",
    "bash -c '/usr/bin/touch {}'",
    "/bin/sh -c 'touch {}'",
    "trap '/usr/bin/touch {}' EXIT",
    'touch() {{ command /usr/bin/touch "$@"; }}; touch {}',
    "coproc /usr/bin/touch {}",
    "mapfile -C '/usr/bin/touch {} #' -c 1 a <<< x",
    "set -o posix; /usr/bin/touch {}",
    "POSIXLY_CORRECT=1; exec /usr/bin/touch {}",
    "enable -f /usr/lib/bash/mkdir mkdir; mkdir {}",
    "alias t=/usr/bin/touch; shopt -s expand_aliases\nt {}",
    'python3 -c \'open("{}", "w")\'',
    "nohup /usr/bin/touch {} &",
    "/usr/bin/touch {} | cat",
    "cat <(/usr/bin/touch {})",
    "exec -a x /usr/bin/touch {}",
    "time /usr/bin/touch {}",
    "! /usr/bin/touch {}",
    "if /usr/bin/touch {}; then :; fi",
]


@pytest.mark.parametrize("attack", ATTACKS)
def test_bash_executes_no_program_and_writes_no_file(attack, tmp_path):
    target = tmp_path / "made"
    try:
        found = reading.expand(f"{attack.format(target)}\npython3 -m verl.trainer.main_ppo a.b=1\n")
    except reading.Unreadable:
        found = []
    assert not target.exists()
    assert all(isinstance(word, str) for words in found for word in words)


def test_the_recorder_is_what_keeps_programs_from_running(tmp_path, monkeypatch):
    """Without the restricted shell the same script would run a program: the test above can fail."""
    target = tmp_path / "made"
    weaker = tmp_path / "record.sh"
    weaker.write_text(
        reading.RECORDER.read_text().replace("\nset -r\n", "\n").replace("readonly PATH", "readonly UNUSED")
    )
    monkeypatch.setattr(reading, "RECORDER", weaker)
    reading.expand(f"shopt -u extdebug\n/usr/bin/touch {target}\n")
    assert target.exists()


def test_bash_expands_variables_arrays_loops_and_redirections(tmp_path, monkeypatch):
    monkeypatch.setenv("FROM_OUTSIDE", "outside")
    script = """
    set -euxo pipefail
    cd /nowhere
    source /nowhere/env.sh
    LR=${LR:-1e-6}; N=$((2 * 4))
    ARGS=( data.train_batch_size=$N   # of a step
           "trainer.experiment_name=$(basename /a/b/run.sh .sh) $FROM_OUTSIDE" )
    if [ "$N" -gt 4 ]; then ARGS+=(x.y=${LR}); fi
    for n in 1 2; do
        ray stop; sleep 5
        CUDA_VISIBLE_DEVICES=0 /opt/venv/bin/python -m verl.trainer.main_ppo \\
            "${ARGS[@]}" rollout.n=$n "$@" > $n.log 2>&1 &
    done
    exit 1
    """
    found = [words for words in reading.expand(script, "run.sh", ["z=1"]) if "verl.trainer.main_ppo" in words]
    assert [words[-6:] for words in found] == [
        [
            "verl.trainer.main_ppo",
            "data.train_batch_size=8",
            "trainer.experiment_name=run outside",
            "x.y=1e-6",
            f"rollout.n={n}",
            "z=1",
        ]
        for n in (1, 2)
    ]
    assert found[0][:2] == ["CUDA_VISIBLE_DEVICES=0", "/opt/venv/bin/python"]


# What published scripts do around their command -> words that our command must have.
SHELL = [
    ("IMAGE=${1:?Usage: $0 IMAGE}\necho $IMAGE\n{verl}", "--num_unique_prompts_rollout 64"),
    ("set -eu\nIMAGE=$1\nTAG=$2\n{verl}", "--num_unique_prompts_rollout 64"),
    ('if [ "$PET_NODE_RANK" -eq 0 ]; then\n  {verl}\nfi', "--num_unique_prompts_rollout 64"),
    ("set -u\nif [[ $NODE_RANK == 0 ]]; then {verl}; fi", "--num_unique_prompts_rollout 64"),
    ("case $SLURM_PROCID in 0) {verl} ;; esac", "--num_unique_prompts_rollout 64"),
    ("ROOT=<the root path>\n{verl} trainer.default_local_dir=$ROOT/out", "--output_dir the_root_path/out"),
    ("NAME='my run'\n{verl} trainer.default_local_dir=/out/$NAME", "--output_dir /out/my"),
    ("P='-m openrlhf.cli.train_ppo_ray'\npython $P --ckpt.output_dir /out/my run", "--output_dir '/out/my run'"),
]


@pytest.mark.parametrize("text, words", SHELL)
def test_what_published_scripts_do_around_their_command(text, words, tmp_path, monkeypatch):
    for name in ("PET_NODE_RANK", "NODE_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "run.sh"
    verl = "python -m verl.trainer.main_ppo data.train_batch_size=64 actor_rollout_ref.model.path=M"
    file.write_text(text.replace("{verl}", verl))
    (command,) = translate.commands_in(str(file), [], "")
    assert words in translate.command_line(translate.translate(command, translate.recognized(command)))


@pytest.mark.parametrize("text, said", [
    ("python -m verl.trainer.main_ppo actor_rollout_ref.model.path=${MODEL:?give a model}", "MODEL: give a model"),
    ("x=1\nif then\npython -m verl.trainer.main_ppo a.b=1", "line 2: syntax error"),
])  # fmt: skip
def test_a_script_that_bash_cannot_expand_is_an_error_with_its_place(text, said, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("MODEL", raising=False)
    (tmp_path / "run.sh").write_text(text)
    assert translate.main(["--file", str(tmp_path / "run.sh")]) == 2
    assert said in capsys.readouterr().err


PYTHON = """
import argparse
from dataclasses import dataclass, field
from trl import GRPOConfig, GRPOTrainer

@dataclass
class Own:
    lr: float = field(default=2e-6, metadata={})
    beta = 0.04

def make(args, own, longest=1024, prompt_length=256):
    kwargs = {"learning_rate": own.lr, "beta": own.beta, "num_generations": args.generations}
    return GRPOConfig(
        output_dir=str(args.out), per_device_train_batch_size=args.generations * 4,
        max_completion_length=longest - prompt_length, temperature=args.hot or 0.9,
        num_iterations=2 if args.mode == "many" else 1, gradient_checkpointing=args.checkpointing, **kwargs)

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="results")
parser.add_argument("-g", "--generations", type=int, default=4)
parser.add_argument("--hot", type=float, default=None)
parser.add_argument("--mode", default="many")
parser.add_argument("--checkpointing", action="store_true")
parser.add_argument("--model-id", default="Qwen/Qwen3-0.6B")
args = parser.parse_args()
def score(completions, **kwargs):
    return [0.0 for _ in completions]
GRPOTrainer(model=args.model_id, reward_funcs=score, args=make(args, Own())).train()
"""


def test_defaults_of_options_fields_and_arguments_in_a_python_file_are_read(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(PYTHON)
    (command,) = translate.commands_in(str(file), [], "")
    ours = translate.translate(command, "trl")
    wanted = {"model_name_or_path": "Qwen/Qwen3-0.6B", "output_dir": "results", "learning_rate": 2e-6, "beta": 0.04}
    wanted |= {"num_samples_per_prompt_rollout": 4, "num_unique_prompts_rollout": 4, "max_response_length": 768}
    assert ours.flags.items() >= (wanted | {"temperature": 0.9, "num_epochs": 2}).items()
    assert not [text for text in ours.absent if "computed" in text]


def test_a_reader_that_closes_early_ends_the_program_quietly():
    words = [
        sys.executable,
        str(ROOT / "scripts" / "translate.py"),
        "--",
        "python",
        "-m",
        "verl.trainer.main_ppo",
        "a.b=1",
    ]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_a_script_that_never_ends_and_a_variable_that_is_not_set_are_errors(monkeypatch):
    monkeypatch.setattr(reading, "SECONDS", 0.5)
    with pytest.raises(reading.Unreadable, match="did not finish"):
        reading.expand("while :; do :; done")


# --------------------------------------------------------------------------------------------------------------- Python


def test_a_python_file_is_read_by_its_syntax_tree_and_never_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("""
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
open("made", "w")
NAME = "Qwen/Qwen2.5-0.5B"
data = load_dataset("openai/gsm8k", "main", split="train").map(lambda row: {"prompt": row["question"]})
def reward_len(completions, answer, **kwargs):
    return [len(c) for c in completions]
config = GRPOConfig(output_dir=f"out/{NAME}", learning_rate=2e-6, num_generations=4, beta=chosen())
trainer = GRPOTrainer(model=NAME, reward_funcs=[reward_len], args=config, train_dataset=data)
""")
    (command,) = translate.commands_in("train.py", [], "")
    ours = translate.translate(command, translate.recognized(command))
    assert not (tmp_path / "made").exists()
    assert ours.flags["dataset"] == "openai/gsm8k:main" and ours.flags["ground_truth_key"] == "answer"
    assert (ours.flags["learning_rate"], ours.flags["output_dir"]) == (2e-6, "out/Qwen/Qwen2.5-0.5B")
    assert any("beta = chosen()" in text for text in ours.absent)
    assert any("reward_len" in text and "function(response, ground_truth, row)" in text for text in ours.differs)


# ------------------------------------------------------------------------------------------------- the error of grpo.py


@pytest.mark.parametrize(
    "words, last",
    [
        (["actor_rollout_ref.model.path=X"], "python grpo.py --model_name_or_path X"),
        (["--num_generations", "4", "--seed", "2"], "python grpo.py --seed 2 --num_samples_per_prompt_rollout 4"),
        (
            ["--dataset_name", "D", "--reward_funcs", "accuracy_reward", "--max_completion_length", "64"],
            "python grpo.py --preset trl ",
        ),
        (["--prompt_data", "D", "--track"], "--dataset D"),
        (
            ["--dataset_name", "D", "--reward_funcs", "accuracy_reward"],
            "python grpo.py --dataset D --prompt_key prompt --ground_truth_key solution --verifier math",
        ),
        (
            [
                "--response_length",
                "64",
                "--vllm_enforce_eager",
                "--single_gpu_mode",
                "--vllm_gpu_memory_utilization",
                "0.4",
            ],
            """--vllm_args '{"enforce_eager": true, "gpu_memory_utilization": 0.4}'""",
        ),
    ],
)
def test_the_error_ends_with_the_translated_command(words, last, capsys):
    script = importlib.import_module("grpo")
    with pytest.raises(SystemExit) as end:
        flags.parse(script.Args, words=words)
    assert end.value.code == 2
    lines = capsys.readouterr().err.rstrip("\n").splitlines()
    assert any("the command here is the last line" in line for line in lines[:2])  # a renamed flag has a warning first
    assert last in lines[-1].replace(Path(sys.argv[0]).name, "grpo.py")
    if "--dataset_name" in words:
        assert any("--preset trl" in line for line in lines), "the defaults on which the command relies"


def test_translating_takes_less_than_a_second():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    words = ["-m", "verl.trainer.main_ppo", "algorithm.adv_estimator=grpo", "data.train_batch_size=8"]
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "translate.py", "--", "python", *words], capture_output=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0
    imported = "import sys; sys.argv=['x']; sys.path.insert(0, 'scripts'); import translate; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", imported], capture_output=True, text=True, cwd=ROOT).stdout.split()
    assert not {"torch", "transformers", "datasets", "tyro", "numpy"} & set(modules)


@pytest.mark.parametrize("framework", rules.FRAMEWORKS)
def test_metrics_are_names_of_ours(framework):
    page = (ROOT / "docs" / "metrics.md").read_text()
    lines = translate.metrics(framework).splitlines()
    assert len(lines) >= 5
    for line in lines:
        for name in re.findall(r"[a-z]+/\w[\w@]*", line.split("  ")[-1]):
            assert name in page, line


# --------------------------------------------------------------------------- the keys of the frameworks' configurations


def flat(tree: dict) -> set[str]:
    return {key for key in reading.flat(tree) if not key.endswith("_target_")}


def fields_of(texts: list[str], name: str) -> set[str]:
    """Fields of a dataclass and of its bases, by the syntax trees of the files they are in."""
    classes = {
        node.name: node for text in texts for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)
    }

    def own(name: str) -> set[str]:
        node = classes.get(name)
        if node is None:
            return set()
        lines = [
            line
            for line in node.body
            if isinstance(line, ast.AnnAssign) and "ClassVar" not in ast.unparse(line.annotation)
        ]
        found = {line.target.id for line in lines}
        return found.union(*(own(ast.unparse(base).rpartition(".")[2]) for base in node.bases))

    return own(name)


def options_of(text: str) -> set[str]:
    """Names of the options of an argparse program; those of a loop over actor and critic for both."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            word = re.fullmatch(r"f?(['\"])--(.*)\1", ast.unparse(node.args[0]))
            name = word.group(2) if word else ""
            found |= {name.replace("{prefix}", model) for model in ("actor", "critic")}
    return found - {""}


def keys_in(name: str, folder: Path) -> set[str]:
    """The keys of a framework's configuration, read from its wheel."""
    if name == "verl":
        config = folder / "verl" / "trainer" / "config"
        files = [config / "_generated_ppo_trainer.yaml", config / "_generated_ppo_megatron_trainer.yaml"]
        return set().union(*(flat(yaml.safe_load(file.read_text())) for file in files))
    if name == "trl":
        files = [
            "trainer/base_config.py",
            "trainer/grpo_config.py",
            "trainer/model_config.py",
            "scripts/utils.py",
            "scripts/grpo.py",
        ]
        texts = [(folder / "trl" / file).read_text() for file in files]
        texts.append((Path(transformers.__file__).parent / "training_args.py").read_text())
        names = ("GRPOScriptArguments", "GRPOConfig", "ModelConfig", "DatasetMixtureConfig")
        return set().union(*(fields_of(texts, one) for one in names))
    if name == "openrlhf":
        return options_of(next(folder.rglob("train_ppo_ray.py")).read_text())
    text = (folder / "areal" / "api" / "cli_args.py").read_text()
    found = set()
    for prefix, kind in (
        ("", "PPOConfig"),
        ("actor.", "PPOActorConfig"),
        ("critic.", "PPOCriticConfig"),
        ("gconfig.", "GenerationHyperparameters"),
    ):
        found |= {prefix + key for key in fields_of([text], kind)}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["verl", "trl", "openrlhf", "areal"])
def test_every_key_of_the_installed_framework_has_a_row(name, tmp_path_factory):
    package, version = presets.PRESETS[name].version.split()
    folder = Path(os.environ.get("RLVR_FRAMEWORKS") or tmp_path_factory.getbasetemp() / "frameworks") / package
    if reason := frameworks.install(package, version, folder):
        pytest.skip(reason)
    keys = keys_in(name, folder)
    table = rules.rows(name)
    sections = {key.rpartition(".")[0] for key in table} | {key.split(".")[0] for key in table}
    assert len(keys) > 30
    assert {key for key in keys if key not in table and key not in sections} == set()


def test_the_page_of_flags_is_what_the_tables_give():
    assert flags_page.PAGE.read_text() == flags_page.page(), "run: python studies/flags_page.py"
    assert flags_page.EVIDENCE.read_text() == flags_page.evidence(), "run: python studies/flags_page.py"
    assert f"The tests try {len(ATTACKS)} ways" in " ".join(flags_page.ABOUT.split())


@pytest.mark.parametrize("named", [["--file"], []], ids=["--file FILE", "FILE"])
def test_a_file_may_be_given_alone(tmp_path, capsys, named):
    """`translate.py train.py` reads the file; a word that is no file is still the name of a framework."""
    file = tmp_path / "train.py"
    file.write_text('from trl import GRPOTrainer\nGRPOTrainer(model="M", train_dataset="D").train()\n')
    assert translate.main([*named, str(file), "--command_only"]) == 0
    assert capsys.readouterr().out.startswith("python grpo.py --preset trl ")
    with pytest.raises(SystemExit):
        translate.main(["nothing.py"])


@pytest.mark.parametrize(("framework", "line", "ours"), flags_page.LOGGERS)
def test_loggers_that_exist_here(framework, line, ours):
    """Both trackers by name; the switch alone is wandb, and another logger is none."""
    start = {"verl": "algorithm.adv_estimator=grpo", "trl": "--num_generations 8"}.get(framework, "")
    command = translate.command_line(translated(f"{start} {line}", framework))
    variables = [word for word in command.split() if word.startswith("WANDB_MODE=")]
    trackers = re.findall(r"--track(?: (?:wandb|tensorboard))*", command)
    assert " ".join(variables + trackers) == ours
    assert ("WANDB_PROJECT=" in command) <= ("tensorboard" not in ours or "wandb" in ours)


def test_what_loggers_take_from_elsewhere():
    """An offline run of wandb stays offline; folders for event files, and SwanLab, are explained."""
    words = "stats_logger.wandb.mode=offline stats_logger.wandb.project=p stats_logger.swanlab.mode=local"
    ours = translated(words, "areal")
    assert ours.env == {"WANDB_MODE": "offline", "WANDB_PROJECT": "p"}
    assert any("swanlab convert" in text for text in ours.differs)
    for framework, word in (("areal", "stats_logger.tensorboard.path=a"), ("openrlhf", "--logger.tensorboard_dir a")):
        assert any("into the run's folder" in text for text in translated(word, framework).differs)

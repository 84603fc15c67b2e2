"""Defaults of a bare command for another model or data set: from the model's size, the verifier, and the data."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import is_finished
import pytest
from helpers import PROBLEMS, make_tiny, rejected

import grpo
import ppo
from rewards import truth_error
from runtime.arguments import flags
from runtime.data import problem_set, rendering
from runtime.data.samples import Problem
from runtime.run import directory, logger
from runtime.run.identity import changed_arguments, code_of, recorded
from runtime.training import derived_defaults, model_files


def parsed(*words: str, of=grpo):
    return flags.parse(of.Args, words=[str(word) for word in words])


def of_size(parameters: float) -> model_files.Model:
    return model_files.Model(int(parameters), 24, 896, 4864, 14, 2, 64, 151_936)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """The tiny model with a context of 8192."""
    folder = make_tiny(tmp_path_factory.mktemp("models") / "roomy")
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 8192}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def gsm8k(tmp_path) -> Path:
    """200 problems in GSM8K's form, of up to 80 words."""
    rows = []
    for i in range(200):
        rows.append({"question": f"What is {i} + 1? " + "Think. " * (i % 40), "answer": f"It is\n#### {i + 1}"})
    file = tmp_path / "gsm8k.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def filled(args):
    """The arguments as a run has them, and the lines of its header."""
    problems, held_out = problem_set.load_problems(args, truth_error)
    derived_defaults.fill(args, problems, held_out)
    return args, logger.derived_lines(args)


@pytest.mark.integration
@pytest.mark.parametrize("of", [grpo, ppo])
def test_the_quickstart_is_what_it_was(of, tiny):
    """Bare, with flags, and with another small model: nothing is filled in, nothing said, the name as before."""
    for words in ((), ("--seed", "2"), ("--model_name_or_path", tiny)):
        args = parsed(*words, of=of)
        before = dataclasses.asdict(args)
        if not words:
            assert directory.run_name(args, of.Args()) == f"{of.Args().exp_name}__seed=1"
        problems, held_out = problem_set.load_problems(args, truth_error)
        derived_defaults.fill(args, problems, held_out)
        assert dataclasses.asdict(args) == before
        assert logger.derived_lines(args) == []


@pytest.mark.parametrize(
    ("parameters", "rates"),
    [(1.35e8, (3e-5, 1e-4)), (3.6e8, (5e-6, 3e-5)), (4.9e8, (1e-6, 1e-5)), (7.6e9, (1e-6, 1e-5))],
)
def test_the_rate_follows_from_the_size_of_the_model(parameters, rates, monkeypatch):
    """Of policy and critic; what is given, by flag or preset, stays. 20 steps are the quickstart's alone."""
    monkeypatch.setattr(model_files, "read_model", lambda *rest: of_size(parameters))
    problems = [Problem([], "1", "last_number", {})] * 1000
    args = parsed("--model_name_or_path", "someone/model", of=ppo)
    derived_defaults.fill(args, problems, [])
    assert (args.learning_rate, args.critic_learning_rate) == rates
    assert args.total_steps == (20 if parameters < min(derived_defaults.RATES) else 200)
    for words in (["--learning_rate", "7e-6"], ["--learning-rate=7e-6"]):
        args = parsed("--model_name_or_path", "someone/model", *words)
        derived_defaults.fill(args, problems, [])
        assert args.learning_rate == 7e-6
    args = parsed("--model_name_or_path", "someone/model", "--preset", "verl", "--total_epochs", "2")
    derived_defaults.fill(args, problems, [])
    assert args.learning_rate == 1e-6 and args.total_steps == 20
    made = grpo.Args(model_name_or_path="someone/model")
    derived_defaults.fill(made, problems, [])
    assert made == grpo.Args(model_name_or_path="someone/model"), "what is made in Python is meant"


def test_another_default_of_a_copy_is_its_choice(monkeypatch):
    """As that of variants/lora.patch: ten times the rate of full training, which no size of a model replaces."""
    for script in (grpo, ppo):
        defaults = {f.name: f.default for f in dataclasses.fields(script.Args)}
        assert {name: defaults[name] for name in flags.OPEN if name in defaults}.items() <= flags.OPEN.items()

    @dataclasses.dataclass
    class Lora(grpo.Args):
        learning_rate: float = 3e-4
        max_response_length: int = 100

    monkeypatch.setattr(model_files, "read_model", lambda *rest: of_size(1.7e9))
    args = flags.parse(Lora, words=["--model_name_or_path", "someone/model"])
    derived_defaults.fill(args, [Problem([], "1", "last_number", {})] * 1000, [])
    assert args.learning_rate == 3e-4 and args.derived.keys() == {"total_steps"}
    args.dataset = "rows.jsonl"
    assert derived_defaults.open_lengths(args) == ["max_prompt_length"]


def test_lengths_and_steps_follow_from_the_data(gsm8k, tiny):
    """The verifier's length, the longest prompt, at most three epochs; each with its reason in the header."""
    words = ("--dataset", gsm8k, "--model_name_or_path", tiny)
    args, lines = filled(parsed(*words))
    tokenizer = rendering.load_tokenizer(args)
    problems = rendering.render_problems(*problem_set.load_problems(args, truth_error), tokenizer, args)
    longest = max(len(problem.prompt_ids) for part in problems for problem in part)
    assert longest <= args.max_prompt_length < longest + 64 and args.max_prompt_length % 64 == 0
    assert args.max_response_length == 1024 and args.total_steps == 3 * 136 // 8
    text = "\n".join(lines)
    for expected in (
        "--max_response_length 1024 was not given: the verifier gsm8k",
        "the longest prompt has",
        "epochs",
    ):
        assert expected in text
    args, lines = filled(parsed(*words, "--max_response_length", "64", "--max_prompt_length", "999"))
    assert (args.max_response_length, args.max_prompt_length) == (64, 999)
    assert "length" not in "\n".join(lines)


def test_a_verifier_without_a_usual_length_is_refused_with_a_proposal(gsm8k, tiny, capsys):
    words = ("--dataset", gsm8k, "--model_name_or_path", tiny, "--verifier", "format")
    with pytest.raises(SystemExit) as stop:
        filled(parsed(*words))
    assert stop.value.code == 2
    assert "--max_response_length: was not given" in (said := capsys.readouterr().err) and "512" in said
    assert filled(parsed(*words, "--max_response_length", "64"))[0].max_response_length == 64


def test_a_model_that_thinks_gets_room_for_it():
    """Unless that is switched off; and no model gets more than its context."""
    assert derived_defaults.response_length({"gsm8k"}, True, 32768)[0] == 4096
    assert derived_defaults.response_length({"gsm8k", "math,format"}, False, 32768) == (2048, "the verifier math")
    assert derived_defaults.response_length({"math"}, True, 3000)[0] == 3000

    class Tokenizer:
        def __init__(self, template: str, prompt: str):
            self.template, self.prompt = template, prompt

        def get_chat_template(self) -> str:
            return self.template

        def decode(self, ids) -> str:
            return self.prompt

    problem = Problem([], "", "", {}, prompt_ids=[1])
    switch = "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    off = grpo.Args(chat_template='{"enable_thinking": false}')
    assert derived_defaults.thinks(Tokenizer(switch, "assistant\n"), grpo.Args(), problem)
    assert not derived_defaults.thinks(Tokenizer(switch, "assistant\n<think></think>"), off, problem)
    assert derived_defaults.thinks(Tokenizer("", "assistant\n<think>\n"), grpo.Args(), problem)
    assert not derived_defaults.thinks(Tokenizer("", "assistant\n"), grpo.Args(), problem)


def test_what_was_chosen_is_the_runs_own(gsm8k, tiny, tmp_path):
    """One name for one command; the same choice when it is started again; another one, by changed data, is rejected."""
    words = ("--dataset", gsm8k, "--model_name_or_path", tiny, "--output_dir", tmp_path / "runs", "--eval_prompts", 8)
    bare = parsed(*words)
    name = directory.run_name(bare, grpo.Args())
    args, _ = filled(parsed(*words))
    assert directory.run_name(args, grpo.Args()) == name and "max_response" not in name
    folder = tmp_path / "runs" / name
    folder.mkdir(parents=True)
    config = json.loads(json.dumps(recorded(args)))
    assert config["max_response_length"] == 1024
    assert changed_arguments(config, filled(parsed(*words))[0]) == ([], [])
    gsm8k.write_text(gsm8k.read_text() + json.dumps({"question": "word " * 200, "answer": "#### 1"}) + "\n")
    other, _ = changed_arguments(config, filled(parsed(*words))[0])
    assert [line.split()[0] for line in other] == ["--max_prompt_length"]
    given = parsed(*words, "--max_response_length", "1024")
    assert "max_response_length=1024" in directory.run_name(given, grpo.Args()) or "-" in directory.run_name(
        given, grpo.Args()
    )


SMALL_RUN = ("--run_name", "x", "--eval_prompts", "4", "--verifier", "gsm8k")
GIVEN = {"learning_rate": 3e-4, "critic_learning_rate": 7e-4, "max_prompt_length": 200, "max_response_length": 48}


def started(words: tuple, module=grpo) -> Any:
    """The arguments as a start leaves them, on the way into main."""
    args = parsed(*words, of=module)
    module.preflight(args)
    return args


def left_behind(args, finished: bool) -> Path:
    """The folder of a run with these arguments: all of it, or its first two steps and no checkpoint."""
    folder = Path(args.output_dir) / args.run_name
    (folder / "model").mkdir(parents=True)
    config = {"args": recorded(args), "code": code_of(args), "problems": 196}
    config["left_open"] = [name for name in flags.OPEN if flags.is_open(args, name)]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "metrics.jsonl").write_text("".join(f'{{"step": {i}}}\n' for i in (1, 2)))
    (folder / "eval.jsonl").write_text('{"step": 2}\n')
    for name in ("config.json", "model.safetensors"):
        (folder / "model" / name).write_text("")
    if not finished:
        (folder / "model" / "config.json").unlink()
    return folder


@pytest.mark.integration
@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("data", ["quickstart", "other"])
@pytest.mark.parametrize("name", GIVEN)
def test_a_flag_that_was_given_and_is_left_out_makes_another_run(name, data, finished, gsm8k, tiny, tmp_path, capsys):
    """Straight, finished, and as scripts/is_finished.py says it; given again with the same value it is the same run."""
    module = ppo if name == "critic_learning_rate" else grpo
    words = (*SMALL_RUN, "--model_name_or_path", tiny, "--output_dir", tmp_path / "runs", "--total_steps", "2")
    words += ("--dataset", gsm8k if data == "other" else f"{PROBLEMS}")
    monkey = pytest.MonkeyPatch()
    if data == "quickstart":  # reasoning-gym takes seconds: the same class of data by its name
        monkey.setattr(derived_defaults, "other_data", lambda args: False)
    with monkey.context():
        left_behind(started((*words, f"--{name}", GIVEN[name]), module), finished)
        assert f"--{name} {GIVEN[name]} there" in rejected(capsys, started, words, module)
        bare = parsed(*words, of=module)
        state, said = is_finished.state(bare, module.Args())
        assert state == is_finished.LEAVE and f"--{name} {GIVEN[name]} there" in said
        assert bare.learning_rate == grpo.Args.learning_rate, "only a copy is filled in"
        again = parsed(*words, f"--{name}", GIVEN[name], of=module)
        state, said = is_finished.state(again, module.Args())
        assert state == (is_finished.FINISHED if finished else is_finished.RUN), said
    monkey.undo()


def test_what_both_parts_leave_open_is_the_same_run(gsm8k, tiny, tmp_path):
    """A number of steps that was given, and no longer is, is not the end."""
    words = (*SMALL_RUN, "--model_name_or_path", tiny, "--output_dir", tmp_path / "runs", "--dataset", gsm8k)
    folder = left_behind(started(words), True)
    bare = parsed(*words)
    steps = json.loads((folder / "config.json").read_text())["args"]["total_steps"]
    (folder / "metrics.jsonl").write_text(f'{{"step": {steps}}}\n')
    (folder / "eval.jsonl").write_text(f'{{"step": {steps}}}\n')
    assert is_finished.state(bare, grpo.Args())[0] == is_finished.FINISHED
    with pytest.raises(SystemExit) as end:
        started(words)
    assert end.value.code == 0
    shutil.rmtree(folder)
    left_behind(started((*words, "--total_steps", "2")), True)
    assert is_finished.state(bare, grpo.Args()) == (is_finished.RUN, f"begun: {folder} is at step 2 of {steps}")

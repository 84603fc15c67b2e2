"""Problems, their split and order, prompts as token ids, names of runs, and the files that a run writes."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import json
import math
import os
import re
import sys
import types
import typing
from pathlib import Path

import pytest
from helpers import ROOT, make_samples, read_jsonl

import grpo
import ppo
from graders.code import sandbox
from grpo import Args
from rewards import truth_error
from runtime.arguments import flags
from runtime.data import problem_set, prompt_order, rendering
from runtime.data.samples import Problem, Sample
from runtime.run import directory, logger
from runtime.training.memory import Sizes

# ------------------------------------------------------------------------------------------------- problems, prompts


def questions(problems: list[Problem]) -> list[str]:
    return [p.messages[-1]["content"] for p in problems]


def test_split_of_the_default_data():
    """The two-number sums of at least 0 have 155 distinct prompts: 64 are held out, 91 trained on."""
    training, evaluation = problem_set.load_problems(Args(), truth_error)
    assert (len(training), len(evaluation)) == (91, 64)
    assert len({*questions(training), *questions(evaluation)}) == 155
    assert all(float(problem.truth) >= 0 for problem in [*training, *evaluation])
    assert questions(training)[:5] != sorted(questions(training))[:5]
    again = problem_set.load_problems(Args(), truth_error)
    assert [questions(part) for part in again] == [questions(training), questions(evaluation)]
    assert all(json.loads(json.dumps(p.row)) == p.row for p in training), "rows travel to the workers: plain data only"


@pytest.mark.parametrize(
    ("options", "example"),
    [
        ("", "2 - 4 = -2"),
        ("?max_terms=2", "2 - 4 = -2"),
        ("?min_answer=0", "9 - 4 = 5"),
        ("?a=1&min_answer=0", "9 - 4 = 5"),
    ],
)
def test_the_example_of_sums_is_one_that_the_task_has(options, example):
    """A result below zero where there are such, else none; another task has no example."""
    batches = [[{"question": "1 + 1 =", "answer": "2"}]]
    for task, expected in (("chain_sum", f"Write out the calculation: {example}"), ("leg_counting", None)):
        columns = problem_set.look_at(f"reasoning_gym:{task}{options}", batches, grpo.Args(), truth_error)
        assert columns.system == expected


def rows(count: int = 30) -> list[dict]:
    return [{"question": f"{i} + 1 =", "answer": str(i + 1), "level": i % 3} for i in range(count)]


def from_file(folder: Path, content: list[dict], **changes) -> tuple[list[Problem], list[Problem]]:
    path = folder / "problems.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in content))
    return problem_set.load_problems(Args(**{"dataset": str(path), "eval_prompts": 10, **changes}), truth_error)


def test_split_is_seeded_and_disjoint(tmp_path):
    """Equal prompts count once: else one could be held out and trained on."""
    splits = {seed: from_file(tmp_path, rows(), seed=seed) for seed in (1, 2)}
    for training, evaluation in splits.values():
        assert not set(questions(training)) & set(questions(evaluation))
        assert sorted(questions(training) + questions(evaluation)) == sorted(row["question"] for row in rows())
    assert questions(splits[1][1]) != questions(splits[2][1])
    # More evaluation problems keep those there were; the batch size has no say.
    more = from_file(tmp_path, rows(), eval_prompts=15, num_unique_prompts_rollout=4)[1]
    assert questions(more)[:10] == questions(splits[1][1])
    training, evaluation = from_file(tmp_path, rows() + rows() + [{"question": "0 + 1 =", "answer": "1", "level": 9}])
    assert len(training) + len(evaluation) == 30
    training, evaluation = from_file(tmp_path, rows(), eval_prompts=0)
    assert (len(training), evaluation) == (30, [])


def test_contradicting_rows_are_counted(tmp_path, capsys):
    content = [{"problem": f"p{i % 38}", "answer": "7" if i % 3 else str(i)} for i in range(40)]
    from_file(tmp_path, content, num_unique_prompts_rollout=1)
    said = capsys.readouterr().out
    assert "2 prompts stand in several rows with different ground truths" in said


@pytest.fixture(scope="module")
def tokenizer(tiny):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny)


def problem(text: str) -> Problem:
    return Problem([{"role": "user", "content": text}], "1", "exact", {})


@pytest.mark.parametrize("template", ["", "Answer this:", "{{ prompt }}"])
def test_a_template_that_reads_no_messages(tokenizer, tmp_path, refused, template):
    """Every prompt would be the same text, or none: an undefined variable writes nothing."""
    (tmp_path / "mine.jinja").write_text(template)
    args = Args(chat_template=str(tmp_path / "mine.jinja"))
    assert f"--chat_template {tmp_path}/mine.jinja does not render the messages" in refused(
        rendering.render_prompts, [problem("1 + 1 ="), problem("1 + 2 =")], tokenizer, args
    )


# ------------------------------------------------------------------------------------------------ order of the prompts


def order(steps: int, problems: int, prompts: int, seed: int = 1) -> list[int]:
    return [
        i
        for step in range(1, steps + 1)
        for i in prompt_order.prompts_at((step - 1) * prompts, prompts, problems, seed)
    ]


def test_order_is_a_pure_function():
    import random

    forward = [prompt_order.prompts_at(step * 4 - 4, 4, 10, 1) for step in range(1, 9)]
    random.seed(5)
    backward = [prompt_order.prompts_at(step * 4 - 4, 4, 10, 1) for step in range(8, 0, -1)]
    assert forward == backward[::-1]
    assert forward != [prompt_order.prompts_at(step * 4 - 4, 4, 10, 2) for step in range(1, 9)]


def test_every_pass_is_a_permutation_of_its_own():
    passes = [order(10, 10, 4)[i : i + 10] for i in range(0, 40, 10)]  # steps of 4 cross the borders of 10
    assert all(sorted(p) == list(range(10)) for p in passes)
    assert len({tuple(p) for p in passes}) == 4


def test_batch_larger_than_the_data():
    assert sorted(prompt_order.prompts_at(0, 7, 3, 1)[:6]) == [0, 0, 1, 1, 2, 2]


def answered(place: int, scores: list[float]) -> list[Sample]:
    samples = [Sample(place, k, [1], [2], [0.0], "stop", []) for k in range(len(scores))]
    for sample, score in zip(samples, scores, strict=True):
        sample.score = score
        sample.reward = score
    return samples


def draws(prompts: prompt_order.Prompts, steps: int) -> list[list[int]]:
    """The indices drawn by each of ``steps`` steps of 4; multiples of 3 are solved, the others half of the time."""
    found = []
    for _ in range(steps):
        chosen, batch = prompts.draw(4)
        assert [p.truth for p in batch] == [str(i) for i in chosen]
        samples = [s for place, i in enumerate(chosen) for s in answered(place, [1.0, float(i % 3 == 0)])]
        prompts.record(chosen, samples)
        if prompts.args.dataset_filter is not None:
            prompts.drop_solved()
        found.append(chosen)
    return found


def numbered(count: int) -> list[Problem]:
    return [Problem([], str(i), "exact", {}) for i in range(count)]


def test_prompts_without_filter_are_the_pure_function():
    prompts = prompt_order.Prompts(numbered(10), ppo.Args())
    assert all(0 <= rate <= 1 for rate in prompts.state.rates), "fractions, also of what was not drawn yet"
    assert [i for chosen in draws(prompts, 9) for i in chosen] == prompt_order.prompts_at(0, 36, 10, 1)


def test_prompts_drop_solved_problems_after_an_epoch():
    """At most the share, the best solved first; the shorter list starts an epoch of its own."""
    options = {"dataset_filter": (0.3, 0.9)}
    prompts = prompt_order.Prompts(numbered(10), ppo.Args(**options))
    found = [i for chosen in draws(prompts, 9) for i in chosen]
    assert found[:12] == prompt_order.prompts_at(0, 12, 10, 1)
    kept = [i for i in range(10) if i not in (0, 3, 6)]
    assert found[12:20] == [kept[place] for place in prompt_order.prompts_at(0, 8, 7, 1)]
    kept.remove(9)
    assert prompts.state.kept == kept, "one more of seven after the second epoch"


def test_prompts_continue_from_their_state():
    """A checkpoint's JSON state is enough: the following draws are those of the run that never stopped."""
    args = ppo.Args(dataset_filter=(0.3, 0.9))
    whole = draws(prompt_order.Prompts(numbered(10), args), 12)
    for stop in range(12):
        first = prompt_order.Prompts(numbered(10), args)
        begun = draws(first, stop)
        second = prompt_order.Prompts(numbered(10), args)
        vars(second.state).update(json.loads(json.dumps(vars(first.state))))
        assert begun + draws(second, 12 - stop) == whole


def test_sampling_seeds_differ():
    """By seed, step, problem and response, and by nothing else."""
    seeds = {
        request[2]
        for seed in (1, 2)
        for step in (1, 11, "eval")
        for request in prompt_order.requests(range(20), 2, seed, step)
    }
    assert len(seeds) == 2 * 3 * 20 * 2
    assert all(0 <= s < 2**32 for s in seeds)
    assert prompt_order.requests([2], 4, 1, "eval")[3][2] == prompt_order.requests([5, 2], 4, 1, "eval")[7][2]


def test_a_problem_twice_in_a_step_is_not_answered_alike():
    wanted = prompt_order.requests([4, 7, 4], 3, seed=1, step=2)
    assert [(p, k) for p, k, _ in wanted] == [(p, k) for p in range(3) for k in range(3)]
    assert len({seed for _, _, seed in wanted}) == 9
    assert wanted[:6] == prompt_order.requests([4, 7], 3, seed=1, step=2)


# ------------------------------------------------------------------------------------------------------ names of runs

FIELDS = {f.name: f for f in dataclasses.fields(Args)}


def other_value(name: str):
    """A value of the field's type that is not its default."""
    default, hint = FIELDS[name].default, typing.get_type_hints(Args)[name]
    if isinstance(hint, types.UnionType):
        hint = next(t for t in typing.get_args(hint) if t is not type(None))
    if typing.get_origin(hint) is typing.Literal:
        return next(v for v in typing.get_args(hint) if v != default)
    if hint is bool:
        return not default
    if hint in (int, float):
        return hint(3 if default is None else default + 1)
    known = {"preset": "verl", "vllm_args": '{"quantization": "fp8"}', "offload": ("param",)}
    if name in known:
        return known[name]
    return ("a",) if hint == tuple[str, ...] else "other"


def test_an_argument_changes_the_name():
    """Each in its own way, and the same one each time; what may change on resumption keeps it."""
    free = set(flags.MAY_CHANGE)
    changed = {name: [directory.run_name(Args(**{name: other_value(name)}), Args()) for _ in "ab"] for name in FIELDS}
    assert all(first == again for first, again in changed.values())
    plain = directory.run_name(Args(), Args())
    assert all(changed[name][0] == plain for name in free - {"run_name"})
    names = {plain, *(changed[name][0] for name in FIELDS if name not in free)}
    assert len(names) == 1 + len(FIELDS) - len(free) > 80


def test_the_form_of_a_name():
    assert directory.run_name(Args(verifier="environment"), Args()) == "grpo__seed=1", "that of an --environment"
    assert directory.run_name(Args(beta=0.1, seed=3, exp_name="kl"), Args()) == "kl__beta=0.1__seed=3"
    assert directory.run_name(Args(run_name="mine", beta=0.1), Args()) == "mine"
    texts = Args(dataset="tickets.jsonl", prompt_key="ticket_text", temperature=0.7)
    assert re.fullmatch(r"grpo__temperature=0.7-\w{8}__seed=1", directory.run_name(texts, Args()))
    assert set(flags.PRESENTATION) == {
        *("output_dir", "run_name", "dry_run", "overwrite", "track", "log_samples", "save_every"),
        *("resume", "save_minutes", "keep_checkpoints"),
    }, "whatever is added here no longer separates two runs: it must not change what a run computes"


def test_long_and_strange_names():
    long = [directory.run_name(Args(stop_strings=("x" * 500 + end,)), Args()) for end in "ab"]
    assert long[0] != long[1]
    usual = {"learning_rate": 1e-6, "num_unique_prompts_rollout": 128, "max_response_length": 1024, "beta": 0.001}
    usual |= {"num_samples_per_prompt_rollout": 16, "advantage_normalization_type": "centered", "num_mini_batches": 4}
    long.append(directory.run_name(Args(**usual, temperature=0.6), Args()))
    assert long[-1].startswith("grpo__") and long[-1].endswith("__seed=1")
    assert all(len(name.encode()) <= 128 for name in long), "what wandb takes"
    letters = [directory.run_name(Args(stop_strings=(c * 500,), exp_name="e" * 100), Args()) for c in "яé名😀\udcff"]
    assert all(len(os.fsencode(name)) <= 255 for name in letters), "bytes, of which a letter may have four"
    slashes = [directory.run_name(Args(dataset=path), Args()) for path in ("a/b.jsonl", "a-b.jsonl")]
    assert slashes[0] != slashes[1]
    assert not any("/" in name for name in slashes)


# ------------------------------------------------------------------------------------------- every argument has effect


@pytest.mark.parametrize("script", ["grpo", "ppo"])
def test_every_field_is_read(script):
    """A flag that nothing reads would be accepted and do nothing. Read: args.<field>, or named for a getattr."""
    read, named = set(), set()
    runtime = [str(p.relative_to(ROOT)) for p in (ROOT / "runtime").rglob("*.py")]
    for file in (f"{script}.py", "utils.py", "rewards.py", "kl_estimators.py", *runtime):
        for node in ast.walk(ast.parse((ROOT / file).read_text())):
            attribute = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
            if attribute and ast.unparse(node.value) in ("args", "self.args"):
                read.add(node.attr)
            if isinstance(node, ast.FunctionDef) and node.name == "run_name":
                named |= {n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    named |= {f.name for f in dataclasses.fields(Sizes)}
    assert len(read) > 80
    fields = {f.name for f in dataclasses.fields(importlib.import_module(script).Args)}
    either = {f.name for module in (grpo, ppo) for f in dataclasses.fields(module.Args)}
    assert fields - read - named == set(), "declared, but nothing reads it"
    others = {
        "flags_set",
        "recorded_choices",
        "kl_coefficients",
        "loads_reference",
        "engine_length",
        "evaluated",
        "evaluates",
        "reaches_goal",
        "steps",
        "derived",
        "data_digest",
        "get",  # of a table of values
        *flags.STRUCTURED,
    }  # attributes that are no flags
    assert read - either == others, "read, but no such field"


@pytest.mark.parametrize("script", ["grpo.py", "ppo.py"])
def test_every_field_has_its_docstring(script):
    body = next(n for n in ast.parse((ROOT / script).read_text()).body if getattr(n, "name", "") == "Args").body
    body = [node for node in body if not isinstance(node, ast.FunctionDef)]
    for field, text in zip(body[::2], body[1::2], strict=True):
        assert isinstance(field, ast.AnnAssign)
        assert isinstance(text, ast.Expr) and len(text.value.value) > 8, f"{ast.unparse(field.target)} has no docstring"


# -------------------------------------------------------------------------------------------------- files of a run


def new_log(folder: Path, **changes) -> logger.RunLog:
    return logger.RunLog(folder, Args(**changes), 2, 10, True)


def test_config(tmp_path):
    new_log(tmp_path / "run", beta=0.5)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["args"] == json.loads(json.dumps(dataclasses.asdict(Args(beta=0.5))))
    assert config["world_size"] == 2
    assert {"python", "torch", "transformers"} <= set(config["versions"])


def test_what_is_not_finite_is_null(tmp_path):
    log = new_log(tmp_path / "run")
    log.write("metrics.jsonl", {"step": 1, "a": math.nan, "b": math.inf, "c": {"d": -math.inf}, "e": 0.5, "f": True})
    text = (tmp_path / "run" / "metrics.jsonl").read_text()

    def no_constant(word: str) -> None:
        pytest.fail(f"{word} is not JSON")

    record = json.loads(text, parse_constant=no_constant)
    assert record == {"step": 1, "a": None, "b": None, "c": {"d": None}, "e": 0.5, "f": True}


def test_samples_and_metrics_of_a_step(tmp_path):
    log, samples = new_log(tmp_path / "run", log_samples=5), make_samples(prompts=3, group=4)
    batch = [problem(f"prompt {p}") for p in range(3)]
    metrics = {"step": 3, "reward/mean": 0.5, "reward/format": None, "optim/skipped": 0}
    metrics |= {"completions/length_mean": 3.0, "completions/truncated_frac": 0.0, "time/step": 1.0}
    log.step(metrics, samples, batch)
    assert read_jsonl(tmp_path / "run" / "metrics.jsonl")[0].keys() == metrics.keys() - {"reward/format"}
    written = read_jsonl(tmp_path / "run" / "samples.jsonl")
    assert len(written) == 5
    assert {row["prompt"] for row in written} == {"prompt 0", "prompt 1", "prompt 2"}, "not the first group alone"
    assert [row["step"] for row in written] == [3] * 5


STEP = {"optim/skipped": 0, "completions/truncated_frac": 0.0, "time/step": 1.0}  # what a step's line needs


def etas(log, steps: dict[int, dict], capsys) -> list[str]:
    """Log steps with these seconds; return the ETA of each line."""
    capsys.readouterr()
    for step, seconds in steps.items():
        log.step(STEP | {"step": step} | seconds, [], [])
    return re.findall(r"ETA ([\d:]+)", capsys.readouterr().out)


def test_the_eta_leaves_out_the_first_step(tmp_path, capsys):
    """Ten steps: 100 seconds for the first one, which compiles and allocates, and 2 for each of the others."""
    seconds = {1: {"time/step": 100.0}, 2: {"time/step": 2.0}, 3: {"time/step": 2.0}}
    assert etas(new_log(tmp_path / "run"), seconds, capsys) == ["0:15:00", "0:00:16", "0:00:14"]


def test_other_ranks_write_nothing(tmp_path):
    log = logger.RunLog(tmp_path / "run", Args(), 2, 10, False)
    log.write("metrics.jsonl", {"step": 1})
    log.write("bad_batch.jsonl", {"step": -1})
    log.close()
    assert not (tmp_path / "run").exists()


def test_overwrite_leaves_nothing_of_the_old_run(tmp_path):
    new_log(tmp_path / "run").write("metrics.jsonl", {"step": 1})
    new_log(tmp_path / "run", overwrite=True)
    assert sorted(f.name for f in (tmp_path / "run").iterdir()) == ["config.json", "lock"]


def test_wandb_that_cannot_be_reached(tmp_path, monkeypatch, capsys):
    """Tracking goes offline with one line, and the run goes on."""
    import wandb

    calls, logged = [], []

    def init(**options):
        calls.append(options.get("mode"))
        if options.get("mode") != "offline":
            raise wandb.errors.CommError("no route to host\nmore lines")
        return types.SimpleNamespace(id="x", log=lambda r, step: logged.append((step, r)), finish=lambda: None)

    monkeypatch.setattr(wandb, "init", init)
    log = new_log(tmp_path / "run", track=("wandb",))
    log.write("metrics.jsonl", {"step": 4, "reward/mean": 0.5})
    log.write("samples.jsonl", {"step": 4, "response": "x"})
    log.close()
    assert calls == [None, "offline"]
    assert logged == [(4, {"reward/mean": 0.5})]
    said = capsys.readouterr().out
    assert "warning: wandb is not reachable (no route to host)" in said and str(tmp_path) in said


def test_wandb_asks_nobody_and_stops_nothing(tmp_path, monkeypatch, capsys):
    """On a terminal without a login it would wait for a key; where it cannot even track offline, the run goes on."""
    import wandb

    terminal = types.SimpleNamespace(isatty=lambda: True)
    monkeypatch.setattr(sys, "stdin", terminal)
    asked, words = [], sys.argv

    def init(**_):
        asked.append((sys.stdin.isatty(), sys.stdin.read(), sys.argv == words))
        raise wandb.errors.UsageError("")

    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setattr(sys, "argv", [*words, "--judge_api_key", "x"])
    words = sys.argv
    log = new_log(tmp_path / "run", track=("wandb",))
    log.write("metrics.jsonl", {"step": 1})
    log.close()
    assert asked == [(False, "", False)] * 2 and sys.stdin is terminal and sys.argv is words
    said = capsys.readouterr().out
    assert "(UsageError); tracking offline in" in said and "(UsageError); no tracking" in said


@pytest.mark.parametrize("own", [None, "false"])
def test_wandb_advertises_nothing_unless_its_variable_asks_for_it(tmp_path, monkeypatch, own):
    """vLLM imports openai, and wandb then recommends Weave. A value of the user's own stays."""
    import wandb

    found = []

    def init(**_):
        found.append(os.environ["WANDB_DISABLE_WEAVE"])
        return types.SimpleNamespace(log=lambda record, step: None, finish=lambda: None)

    monkeypatch.setenv("WANDB_DISABLE_WEAVE", own or "")
    if own is None:
        monkeypatch.delenv("WANDB_DISABLE_WEAVE")
    monkeypatch.setattr(wandb, "init", init)
    new_log(tmp_path / "run", track=("wandb",)).close()
    assert found == [own or "true"]


# ----------------------------------------------------------------------------------------- verifiers and truths of rows


def test_verifier_of_a_row(tmp_path, refused):
    content = rows()
    for i, name in enumerate(["exact", ["exact", "format"], "exact, format", None]):
        content[i]["scored_by"] = name
    training, _ = from_file(tmp_path, content, eval_prompts=0, verifier_key="scored_by", verifier="gsm8k")
    found = {p.truth: p.verifier for p in training}
    assert [found[str(i + 1)] for i in range(5)] == ["exact", "exact,format", "exact, format", "gsm8k", "gsm8k"]
    content[7]["scored_by"] = "maths"
    message = refused(from_file, tmp_path, content, verifier_key="scored_by")
    assert "--verifier_key scored_by" in message and "row 7" in message and "'maths'" in message


def test_code_rows_that_cannot_be_passed(tmp_path, refused):
    """Their tests are run when the data is read: the row, the column of its solution and the reason are named."""
    check = "def check(candidate):\n    assert candidate(1, 2) == 3\n"
    right = {"answer": check, "entry_point": "add", "solution": "def add(a, b):\n    return a + b"}
    right["time_limit"] = 30.0  # a busy machine must not turn the reason into "time"
    formal = {"answer": [{"input": [1, 2], "output": 3}], "entry_point": "add"}  # nothing to run
    content = [{**row, **(right if i in (3, 5, 7) else formal)} for i, row in enumerate(rows())]
    content[3]["answer"] = "import torch\n" + check
    content[5]["solution"] = "def add(a, b):\n    return (x for x in [a + b])"
    content[7]["time_limit"] = float("nan")
    message = refused(from_file, tmp_path, content, verifier="code", allow_unsafe_code_exec=True)
    assert "3 of 30 rows" in message and "rows 3, 5, 7" in message and "No module named 'torch'" in message
    content[3]["answer"] = check
    message = refused(from_file, tmp_path, content, verifier="code", allow_unsafe_code_exec=True)
    assert "row 5" in message and "in column solution" in message and "generator is not a value" in message
    training, evaluation = from_file(tmp_path, content, verifier="code", allow_unsafe_code_exec=True, bad_rows="drop")
    assert len(training) + len(evaluation) == 28


def test_code_without_namespaces(tmp_path, capsys, refused, monkeypatch):

    monkeypatch.setattr(sandbox, "namespaces_refused", lambda: "not permitted")
    content = [{**row, "answer": [{"stdin": "", "stdout": "1"}]} for row in rows()]
    message = refused(from_file, tmp_path, content, verifier="code")
    assert "not permitted" in message and "--allow_unsafe_code_exec" in message
    from_file(tmp_path, content, verifier="code", allow_unsafe_code_exec=True)
    assert capsys.readouterr().out.count("no sandbox") == 1


def test_starter_code_follows_the_prompt_once():
    """Whatever the form of the tests: it names the function that they call."""
    row = {"starter_code": "def add(a, b):", "tests": "[]"}
    for prompt in ("Sum them.", "Sum them.\n\ndef add(a, b):"):
        (message,) = problem_set._messages("problem", prompt, row)
        assert message["content"] == "Sum them.\n\ndef add(a, b):"


def test_a_dotted_key_reads_an_object_that_is_json_text():
    row = {"verification_info": '{"ground_truth": "7"}'}
    assert problem_set.value_of(row, "verification_info.ground_truth") == "7"


def test_too_few_problems_of_an_environment_name_the_column_to_add(refused):
    args = Args(environment="game.py:Game", num_unique_prompts_rollout=8)
    assert "for example seed" in refused(problem_set.check_enough, [], [], args)

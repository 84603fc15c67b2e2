"""Evaluations: golden numbers, intervals, and scripts/evaluate.py against the run that made the weights."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import evaluate
import pytest
from helpers import (
    PROBLEMS,
    ROOT,
    VERIFIERS,
    clean_environment,
    forked,
    read_jsonl,
    rejected,
    run_here,
    script,
    tiny_args,
)

import grpo
import utils
from runtime.arguments import checks
from runtime.data import prompt_order
from runtime.data.samples import Problem, Sample, majority
from runtime.run import identity
from runtime.training import model_files


def answers(verdicts: list[list], problems: list[Problem] | None = None) -> list[Sample]:
    """Samples: for each problem the answers given, True for a right one, else what was extracted."""
    samples = []
    for p, group in enumerate(verdicts):
        for k, verdict in enumerate(group):
            sample = Sample(p, k, [1], [5] * (k + 1), [0.0] * (k + 1), "length" if k == 0 else "stop", [(4, 0)])
            sample.response = sample.extracted = "7" if verdict is True else str(verdict)
            sample.score = float(verdict is True)
            samples.append(sample)
    return samples


def problems(*sources: str) -> list[Problem]:
    return [Problem([{"role": "user", "content": "?"}], "7", "exact", {}, source=s) for s in sources]


def test_golden_numbers():
    """Two of four right, one of four, all, none: pass@k = 1 - C(n-c, k) / C(n, k) by hand."""
    verdicts = [[True, 3, True, 3], [True, 3, 4, 5], [True] * 4, [3, 3, 4, 5]]
    result = utils.eval_metrics(answers(verdicts), problems(*"aaaa"), step=9)
    assert result["eval/pass@1"] == 7 / 16
    assert result["eval/pass@2"] == pytest.approx((1 - 1 / 6 + 1 - 3 / 6 + 1 + 0) / 4)
    assert result["eval/pass@4"] == result["eval/pass@k"] == 3 / 4
    assert result["eval/majority@k"] == pytest.approx((1 / 2 + 1 / 4 + 1 + 0) / 4), "of equally frequent ones each 1/n"
    assert result["eval/length_mean"] == 2.5
    assert result["eval/truncated_frac"] == 1 / 4
    assert (result["step"], result["eval/problems"], result["eval/samples"]) == (9, 4, 4)
    assert result["eval/weights_version"] == 4
    assert "eval/a/pass@1" not in result, "one source needs no numbers of its own"


@pytest.mark.parametrize(("count", "powers"), [(1, []), (2, [2]), (3, [2]), (4, [2, 4]), (7, [2, 4]), (8, [2, 4, 8])])
def test_powers_of_two(count, powers):
    result = utils.eval_metrics(answers([[True] + [3] * (count - 1)]), problems("a"), step=0)
    given = [name for name in result if name.startswith("eval/pass@")]
    assert sorted(given) == sorted(["eval/pass@1", "eval/pass@k", *(f"eval/pass@{k}" for k in powers)])
    for k in (1, *powers):
        assert result[f"eval/pass@{k}"] == pytest.approx(k / count)  # one right of n: k draws find it with k / n


def test_numbers_of_each_source():
    verdicts = [[True, True], [3, 3], [True, 4]]
    result = utils.eval_metrics(answers(verdicts), problems("a", "b", "b"), step=0)
    assert (result["eval/a/pass@1"], result["eval/b/pass@1"], result["eval/pass@1"]) == (1, 0.25, 0.5)
    assert (result["eval/a/problems"], result["eval/b/problems"]) == (1, 2)
    assert result["eval/b/majority@k"] == 0.25


def test_the_order_of_samples_does_not_matter():
    samples = answers([[True, 3], [3, 3], [True, True]])
    here = utils.eval_metrics(samples, problems(*"aba"), step=0)
    assert utils.eval_metrics(samples[::-1], problems(*"aba"), step=0) == here


def test_majority():
    vote = lambda *verdicts: majority(answers([list(verdicts)]))  # noqa: E731
    assert vote(True, True, 3) == 1
    assert vote(True, 3, 3) == 0
    assert vote(True, 3) == 0.5
    assert vote(True, "", "", "") == 0, "responses that say nothing agree with each other"
    written = answers([[True, True, 3, 3, 3]])
    written[0].extracted, written[1].extracted, written[2].extracted = "7.0", "7", "4"
    assert majority(written) == 0.5, "right ones agree, however written: 2, against 2 that say 3, and one 4"


def test_strict_lenient_and_format_side_by_side():
    """A right number without the box is right for the lenient alone; a verifier's part is the format rate."""
    found = answers([["5", "x"], ["y", "z"]], problems("a", "b"))
    texts = ["\\boxed{7}", "it is 7, I think", "17", "\\boxed{7} in 3 steps"]
    for sample, text, form in zip(found, texts, (1.0, 0.0, 0.0, 1.0), strict=True):
        sample.response = text
        sample.reward_parts = {"correct": float(text == texts[0]), "format": form}
    result = utils.eval_metrics(found, problems("a", "b"), step=0)
    lines = evaluate.table(found, problems("a", "b"), result).splitlines()
    cells = {line.split(" | ")[0]: line.split(" | ") for line in lines}
    place = cells["| data"].index("lenient")
    assert cells["| data"][place + 1] == "format"
    assert [cells[name][2] for name in ("| a", "| b", "| all")] == ["0.500", "0.000", "0.250"]
    assert [cells[name][place : place + 2] for name in ("| a", "| b", "| all")] == [
        ["1.000", "0.500"],
        ["0.500", "0.500"],
        ["0.750", "0.500"],
    ]
    words = [Problem([], "seven", "exact", {})] * 2
    for sample in found:
        sample.reward_parts = {}
    assert evaluate.side_by_side(found, words) == ("–", "–")


@pytest.mark.parametrize("count", [1, 2])
def test_the_columns_of_the_table_have_names_of_their_own(count):
    """With one response per problem pass@k is pass@1; none right of 32 is a rate of 0 to 0.107, not of 0 to 0."""
    several = problems(*["a"] * 32)
    found = answers([["5"] * count] * 32)
    result = utils.eval_metrics(found, several, step=0)
    names, _, row = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in evaluate.table(found, several, result).splitlines()
    )
    assert len(set(names)) == len(names) == len(row)
    assert row[names.index("95 % interval")] == "0.000 to 0.107" and ("pass@2" in names) == (count == 2)


def sample(prompt: int, number: int, length: int, score: float, reason: str = "stop") -> Sample:
    found = Sample(prompt, number, [1], [5] * length, [0.0] * length, reason, [(0, 0)])
    found.score = found.reward = score
    return found


def test_what_samples_say_about_a_run():
    """Responses are shown with their rewards, groups of equal rewards are counted, and lengths give advice."""
    samples = [sample(0, k, 10, float(k == 0)) for k in range(4)]
    samples += [sample(1, k, 20, 1.0) for k in range(4)]
    samples += [sample(2, k, 64, 0.0, "length") for k in range(4)]
    asked = problems(*"aaa")
    lines = evaluate.describe(samples, asked, 2, 64)
    assert [line for line in lines if line.startswith("reward")] == [
        "reward 1, right, 10 tokens, ended by stop",
        "reward 1, right, 20 tokens, ended by stop",
    ]
    assert lines[-3:] == [
        "length     50 % have at most 20 tokens, 95 % at most 64; 33% did not end",
        "signal     33% of the groups have different rewards; the others teach nothing",
        "           more than 64 tokens are wanted: raise --max_response_length and ask again",
    ]
    assert evaluate.describe(samples[:8], asked, 1, 512)[-1].endswith(
        "--max_response_length 32 would hold 95 % of them"
    )
    assert evaluate.describe(samples[:8], asked, 1, 64)[-1].startswith("signal")
    alone = [sample(place, 0, 10, float(place)) for place in range(2)]
    assert evaluate.describe(alone, asked, 1, 32)[-1].startswith("length")  # ppo.py may have one response per prompt


def test_greedy_is_one_response_to_each():
    requests, sampling = prompt_order.eval_requests(5, grpo.Args(eval_sampling='{"temperature": 0}', eval_samples=4))
    assert [place for place, _, _ in requests] == [0, 1, 2, 3, 4] and sampling["temperature"] == 0
    assert len(prompt_order.eval_requests(5, grpo.Args(eval_samples=4))[0]) == 20


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"top_p": 0}', "top_p 0: must be a number from 0.001 to 1"),
        ('{"top_k": 1.5}', "top_k 1.5: must be a whole number from 0 to inf"),
        ('{"max_tokens": true}', "max_tokens True: must be a whole number from 1 to inf"),
        ('{"temperature": "0.6"}', "temperature '0.6': must be a number"),
        ('{"n": 4}', "n is not supported; use temperature, top_p, top_k, min_p, repetition_penalty, max_tokens"),
        ("0.6", 'must be a JSON object; for example \'{"temperature": 0.6'),
    ],
)
def test_settings_that_cannot_be_sampled_with_are_rejected(text, words, capsys):
    message = rejected(capsys, checks.check, grpo.Args(eval_sampling=text), 1)
    assert message.startswith("error: --eval_sampling: ") and words in message


def test_a_longer_evaluation_needs_the_context_of_the_model(tiny, capsys):
    """The engine is built for max_tokens of an evaluation, which the model must be able to hold."""
    args = grpo.Args(model_name_or_path=str(tiny), eval_sampling='{"max_tokens": 250}')
    assert args.engine_length == 256 + 250
    model_files.check_model(args)
    longer = grpo.Args(model_name_or_path=str(tiny), eval_sampling='{"max_tokens": 300}')
    assert "--eval_sampling max_tokens 300 = 556 tokens" in rejected(capsys, model_files.check_model, longer)


# ---------------------------------------------------------------------------------------------- evaluate.py and a run


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory):
    """(folder, samples of the last evaluation, its record) of a short run."""
    out, seen = tmp_path_factory.mktemp("evaluated"), []
    with pytest.MonkeyPatch.context() as patch:
        inside = utils.eval_metrics
        patch.setattr(utils, "eval_metrics", lambda samples, *rest: seen.append(samples) or inside(samples, *rest))
        options = {
            "learning_rate": 1e-2,
            "lr_scheduler_type": "constant",
            "eval_every": 1,
            "dataset": str(PROBLEMS),
        }
        run_here(tiny_args(tiny, out, run_name="run", eval_prompts=6, eval_samples=4, seed=5, **options))
    return out / "run", seen, read_jsonl(out / "run" / "eval.jsonl")


def call(place: Path, *words: str) -> str:
    """Return the script's output for a user, without this process's environment variables of its own run."""
    (code,), text = forked([str(ROOT / "scripts" / "evaluate.py"), *words], place / "log")
    assert code == 0, text
    return text


@pytest.mark.integration
def test_equal_to_the_number_in_the_run(run, tmp_path):
    """Same weights, same seed: the same token ids and the same numbers, from the files that the run left alone."""
    folder, seen, records = run
    said = call(tmp_path, "--run", str(folder), "--samples", "3", "--output", str(tmp_path / "samples.jsonl"))
    assert len(re.findall("^reward ", said, flags=re.MULTILINE)) == 3 and "\nlength     50 % have at most" in said
    rows = read_jsonl(tmp_path / "samples.jsonl")
    assert [(r["problem"], r["sample"], r["response_ids"]) for r in rows] == [
        (s.prompt_id, s.sample_id, s.response_ids.tolist()) for s in seen[-1]
    ]
    last, first = ([s.response_ids.tolist() for s in samples] for samples in (seen[-1], seen[0]))
    assert last != first, "the weights have moved"
    line = next(line for line in said.splitlines() if line.startswith("| problems |"))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    last = records[-1]
    wanted = [f"{last['eval/' + name]:.3f}" for name in ("pass@1", "pass@k", "majority@k")]
    assert [cells[2], cells[6], cells[7]] == wanted
    assert cells[8] == f"{last['eval/length_mean']:.1f}"
    low, high = map(float, cells[3].split(" to "))
    assert low <= last["eval/pass@1"] <= high
    assert sum(r["right"] for r in rows) / len(rows) == last["eval/pass@1"]


# A copy of grpo.py with a flag, an engine and a way to collect of its own: each changes what an evaluation finds.
COPY = (
    (
        "class Args(flags.RunFlags):\n",
        'class Args(flags.RunFlags):\n    mark: str = "its default"\n    """What every response says."""\n',
    ),
    (
        "def vllm_thread(",
        "def vllm_thread(args, *line) -> None:\n"
        "    print(f'the engine of {args.mark}, asleep {args.vllm_sleep}')\n"
        "    utils.hf_thread(args, *line)\n\n\ndef plain_thread(",
    ),
    (
        "    return batch.samples\n",
        "    for sample in batch.samples:\n        sample.response = engine.arguments[0].mark\n"
        "    return batch.samples\n",
    ),
)


@pytest.fixture(scope="module")
def edited(tiny, tmp_path_factory):
    """(folder of a run of an edited copy, the copy)."""
    place = tmp_path_factory.mktemp("edited")
    text = (ROOT / "grpo.py").read_text()
    for before, after in COPY:
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    (place / "edited_grpo.py").write_text(text)
    sys.path.insert(0, str(place))
    changes = {
        "mark": "a mark",
        "rollout": "vllm",
        "run_name": "run",
        "seed": 5,
        "dataset": str(PROBLEMS),
        "eval_prompts": 4,
    }
    run_here(tiny_args(tiny, place, "edited_grpo", **changes), "edited_grpo")
    sys.path.remove(str(place))
    return place / "run", place / "edited_grpo.py"


@pytest.mark.integration
def test_a_run_is_evaluated_by_the_script_that_trained_it(edited, tmp_path):
    """A copy's own engine, its own way to collect and its own flags: a tool that it calls would be missing else.

    With --vllm_sleep engine a run's engine sleeps until the first push, and nothing is pushed here: it stays awake.
    """
    folder, _ = edited
    said = call(tmp_path, "--run", str(folder), "--vllm_sleep", "engine", "--output", str(tmp_path / "samples.jsonl"))
    assert "the engine of a mark, asleep off" in said and "warning: since the run" not in said
    rows = read_jsonl(tmp_path / "samples.jsonl")
    assert {row["response"] for row in rows} == {"a mark"}
    last = read_jsonl(folder / "eval.jsonl")[-1]
    assert sum(row["right"] for row in rows) / len(rows) == last["eval/pass@1"]
    lengths = [len(row["response_ids"]) for row in rows]
    assert sum(lengths) / len(lengths) == last["eval/length_mean"]


def test_a_script_that_is_gone_or_another_one_is_refused(edited, capsys, refused):
    """Its engine is part of the measurement; --accept_changed_code takes today's, and says so."""
    folder, copy = edited
    text = copy.read_text()
    try:
        copy.write_text(text + "# an edit\n")
        identity._digests.cache_clear()  # files are read once per process, and the run was one of this
        said = refused(evaluate.parse, ["--run", str(folder)])
        assert "edited_grpo.py has changed since the run" in said
        assert "restore it" in said and "--accept_changed_code" in said
        args, *_, script = evaluate.parse(["--run", str(folder), "--accept_changed_code", "--mark", "another"])
        assert args.mark == "another" and script.resolve() == copy
        assert "warning: since the run" in capsys.readouterr().err
        copy.unlink()
        assert "does not exist any more" in refused(evaluate.parse, ["--run", str(folder), "--accept_changed_code"])
    finally:
        copy.write_text(text)
        identity._digests.cache_clear()


def test_a_run_with_flags_that_its_script_no_longer_has_is_refused(run, tmp_path, refused):
    """Reject the run instead of evaluating it without them: its verifier or its data may have had another name."""
    folder = run[0]
    config = json.loads((folder / "config.json").read_text())
    config["args"]["reward_fn"] = config["args"].pop("verifier")
    (tmp_path / "config.json").write_text(json.dumps(config))
    message = refused(evaluate.parse, ["--run", str(tmp_path)])
    assert "no longer has flags of this run (--reward_fn)" in message and "commit" in message


def test_other_files_that_have_changed_are_named_and_secrets_are_asked_for(edited, tmp_path, capsys, refused):
    """A reward function that was edited gives other scores; a flag that was hidden in config.json is not its value."""
    folder, _ = edited
    config = json.loads((folder / "config.json").read_text())
    config["code"]["rewards.py"] = "another"
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert evaluate.parse(["--run", str(tmp_path)])[0].recorded_choices["dtype"] == "float32"
    for words, name in ([], "eval_samples.jsonl"), (["--model_name_or_path", "a/b"], "eval_samples_a_b.jsonl"):
        assert evaluate.parse(["--run", str(tmp_path), *words])[1] == tmp_path / name, "another model replaces nothing"
    assert "warning: since the run, rewards.py has changed" in capsys.readouterr().err
    config["args"]["mark"] = "***"
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "--mark: a secret" in refused(evaluate.parse, ["--run", str(tmp_path)])
    assert evaluate.parse(["--run", str(tmp_path), "--mark", "given"])[0].mark == "given"


@pytest.fixture
def with_eval_dataset(run, tmp_path) -> Path:
    """The folder of the same run, as if its evaluations had been on data of their own (--eval_dataset)."""
    folder = tmp_path / "with eval_dataset"
    folder.mkdir()
    (folder / "model").symlink_to(run[0] / "model")
    config = json.loads((run[0] / "config.json").read_text())
    config["args"] |= {"eval_dataset": str(tmp_path / "own.jsonl"), "verifier": "exact", "eval_prompts": 3}
    del config["inputs"]  # of other data
    (tmp_path / "own.jsonl").write_text("".join(f'{{"question": "{i} + 0 =", "answer": "{i}"}}\n' for i in range(5)))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_run_with_eval_dataset_is_evaluated_on_it_or_on_other_data(with_eval_dataset, tmp_path, refused):
    """--dataset names what to evaluate on, whatever the run evaluated on; nothing complains of the run's own flag."""
    asked = lambda found: [problem.messages[-1]["content"] for problem in found]  # noqa: E731
    args, _, _, held_out, _ = evaluate.parse(["--run", str(with_eval_dataset)])
    assert asked(evaluate.problems_of(args, held_out)) == ["0 + 0 =", "1 + 0 =", "2 + 0 ="]
    other = tmp_path / "other.jsonl"
    other.write_text("".join(f'{{"question": "9 + {i} =", "answer": "{9 + i}"}}\n' for i in range(4)))
    args, _, _, held_out, _ = evaluate.parse(["--run", str(with_eval_dataset), "--dataset", str(other)])
    assert asked(evaluate.problems_of(args, held_out)) == ["9 + 0 =", "9 + 1 =", "9 + 2 ="]
    assert "name what to evaluate on by --dataset" in refused(
        evaluate.parse, ["--run", str(with_eval_dataset), "--eval_dataset", str(other)]
    )


@pytest.mark.integration
def test_other_data(with_eval_dataset, tmp_path):
    """The first problems of a mixture, in order, each source with a row of its own, greedily."""
    folder = with_eval_dataset
    for name in "ab":
        content = [{"question": f"{i} + {name} =", "answer": "1"} for i in range(9)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    mixture = json.dumps({str(tmp_path / "a.jsonl"): 1.0, str(tmp_path / "b.jsonl"): 4})
    flags = ["--dataset", mixture, "--eval_prompts", "0", "--sampling", '{"temperature": 0}']
    said = call(tmp_path, "--run", str(folder), *flags, "--verifier", "exact", "--output", str(tmp_path / "s.jsonl"))
    rows = read_jsonl(tmp_path / "s.jsonl")
    assert [r["source"] for r in rows] == ["a"] * 9 + ["b"] * 4 and {r["verifier"] for r in rows} == {"exact"}
    assert rows[0]["prompt"][-1]["content"] == "0 + a ="
    table = [line.split("|")[1:3] for line in said.splitlines() if line.startswith("| ")]
    assert [[cell.strip() for cell in cells] for cells in table[1:]] == [["a", "9"], ["b", "4"], ["all", "13"]]
    assert "temperature 0" in said


def test_a_pasted_flag_of_training_is_a_warning(capsys):
    args = evaluate.parse(["--save_every", "5", "--track", "--eval-every=2", "--eval_samples", "3"])[0]
    assert (args.save_every, args.eval_samples) == (5, 3)
    said = capsys.readouterr().err
    assert said == "warning: --save_every, --track, --eval_every: no effect in an evaluation, which does not train\n"


@pytest.mark.integration
@pytest.mark.parametrize("name", ["grpo.py", "ppo.py", "scripts/evaluate.py"])
def test_help_whose_reader_ends_early_is_no_error(name):
    """`--help | head -1`: nothing on standard error."""
    line = f"{shlex.join(script(name, '--help'))} | head -1"
    done = subprocess.run(line, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "usage" in done.stdout and done.stderr == ""


@pytest.mark.integration
def test_refusals(tmp_path):
    spoiled = tmp_path / "spoiled"
    spoiled.mkdir()
    (spoiled / "config.json").write_text("")
    for words, message in (
        (["--run", str(spoiled)], "its config.json cannot be read"),
        (["--run", str(tmp_path)], "no config.json"),
        (["--model_name_or_path", str(tmp_path / "nothing")], "--model_name_or_path"),
        (["--eval_dataset", "other.jsonl"], "--eval_dataset is for a run"),
    ):
        line = script("scripts/evaluate.py", *words)  # a process of its own: no error waits for the slow imports
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=200, env=clean_environment())
        assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


# ----------------------------------------------------------------------------------------------------- dynamic sampling


def group(place: int, rewards: list[float], mark: int) -> list[Sample]:
    samples = [Sample(place, k, [1], [mark], [0.0], "stop", []) for k in range(len(rewards))]
    for sample, reward in zip(samples, rewards, strict=True):
        sample.reward = reward
    return samples


def test_groups_are_replaced():
    samples = group(0, [1, 1], 0) + group(1, [0, 1], 1) + group(2, [0, 0], 2) + group(3, [1, 1], 3)
    new = group(0, [0, 0], 10) + group(1, [1, 0], 11) + group(2, [0, 1], 12)
    batch, more = list(problems(*"abcd")), list(problems(*"xyz"))
    assert prompt_order.equal_groups(samples) == [0, 2, 3]
    prompt_order.replace_groups(batch, samples, more, new)
    assert [p.source for p in batch] == ["y", "b", "z", "d"]
    assert [s.response_ids[0] for s in samples] == [11, 11, 1, 1, 12, 12, 3, 3]
    assert [(s.prompt_id, s.sample_id) for s in samples] == [(p, k) for p in range(4) for k in range(2)]
    assert prompt_order.equal_groups(samples) == [3]
    measured = prompt_order.draw_metrics([samples, new], prompts=4)
    assert measured["data/dropped"] == 3 and measured["data/rounds"] == 1
    assert measured["data/zero_std_frac"] == pytest.approx(2 / 7)


@pytest.mark.integration
def test_dynamic_sampling_in_a_run(tiny, tmp_path, monkeypatch):
    """More groups that differ, and prompts in the order of the counter: what was drawn is drawn no second time."""
    drawn, inside = [], prompt_order.prompts_at
    monkeypatch.setattr(prompt_order, "prompts_at", lambda *rest: drawn.append(rest[:2]) or inside(*rest))
    options = {"num_samples_per_prompt_rollout": 2, "eval_prompts": 0, "num_unique_prompts_rollout": 8}
    few, many = (
        run_here(tiny_args(tiny, tmp_path, run_name=f"{rounds}", dynamic_sampling_rounds=rounds, **options))
        for rounds in (0, 8)
    )
    assert [m["reward/zero_std_frac"] for m in many] == [0, 0] and few[0]["reward/zero_std_frac"] > 0
    assert many[0]["data/zero_std_frac"] > 0, "what came before is still told"
    assert many[0]["data/dropped"] > 0 and many[0]["data/rounds"] > 0
    assert "data/rounds" not in few[0]
    assert drawn[:2] == [(0, 8), (8, 8)]
    ends = [position + count for position, count in drawn[2:]]
    assert [position for position, _ in drawn[2:]] == [0, *ends[:-1]]
    assert len(drawn) == 4 + sum(m["data/rounds"] for m in many)
    assert ends[-1] == 16 + sum(m["data/dropped"] for m in many)


@pytest.mark.integration
def test_all_solved_does_not_go_on_for_ever(tiny, tmp_path):
    """Every group equal, whatever is drawn: the rounds end, the step is recorded, and nothing moves."""
    fn = f"{VERIFIERS}:always"
    metrics = run_here(tiny_args(tiny, tmp_path, dynamic_sampling_rounds=3, verifier=fn, eval_prompts=0))
    assert [m["data/rounds"] for m in metrics] == [3, 3]
    assert [m["data/dropped"] for m in metrics] == [12, 12]
    assert [m["data/zero_std_frac"] for m in metrics] == [1, 1]
    assert [m["optim/grad_norm"] for m in metrics] == [0, 0]

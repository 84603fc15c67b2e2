"""Every data set of the installed reasoning-gym: through our path its own answer is right, and others are not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import deque
from importlib import metadata

import fork_server
import pytest
from helpers import ROOT

import rewards
from graders import reasoning_gym_tasks
from graders.reasoning_gym_tasks import GYM_UNSUPPORTED
from grpo import Args
from rewards import VERIFIERS, RewardPool, truth_error
from runtime.data import problem_set

PAGE = ROOT / "docs" / "data_and_rewards.md"
ROWS = 4
# These have many right answers, and what is right for another row may be right here.
SEVERAL_RIGHT = {"graph_color", "jugs", "n_queens", "propositional_logic", "quantum_lock", "rush_hour", "sokoban"}
OPTIONS = {
    "composite": '&datasets=[{"name":"chain_sum"},{"name":"rubiks_cube"},{"name":"arc_agi"}]',
    "rush_hour": "&min_moves=1&max_moves=8",
    "knight_swap": "&max_nodes=7",
}


def problems(name: str, rows: int = ROWS, options: str = "") -> list[problem_set.Problem]:
    source = f"reasoning_gym:{name}?size={rows}&seed=5{OPTIONS.get(name, '')}{options}"
    found = list(problem_set.read_problems(source, Args(verifier="reasoning_gym"), truth_error).values())
    for problem in found:
        problem.row = json.loads(json.dumps(problem.row))  # as a prepared file has it
    return found


def rush_hour_solution(board: str) -> str:
    """The moves that free the car, found breadth first with reasoning-gym's own board: it gives none away."""
    from reasoning_gym.games.rush_hour import Board

    seen = set()
    waiting = deque([""])
    while waiting:
        moves = waiting.popleft()
        now = Board(board)
        now.perform_moves(moves)
        if now.solved:
            return moves.strip()
        state = tuple(piece.mask for piece in now._pieces)
        if state in seen:
            continue
        seen.add(state)
        labels = [chr(ord("A") + i) for i in range(len(now._pieces))]
        waiting.extend(f"{moves} {label}{step}" for label in labels for step in ("+1", "-1"))
    raise AssertionError("no solution")


def oracle(problem: problem_set.Problem) -> str:
    """Return the data set's own correct answer, or the example in its metadata."""
    if problem.row["answer"] is not None:
        return problem.row["answer"]
    about = reasoning_gym_tasks.untagged(json.loads(problem.row["reasoning_gym"])["metadata"])
    if about["source_dataset"] == "graph_color":
        return json.dumps(about["possible_answer"])
    if about["source_dataset"] == "rush_hour":
        return rush_hour_solution(about["board_config"])
    return about.get("example_correct_answer") or about["example_answer"]


def score(problem: problem_set.Problem, answer: str) -> float:
    reward, _ = rewards._verify_by("reasoning_gym", f"so <answer>{answer}</answer>", problem.truth, problem.row)
    return reward.score


def counts(name: str) -> tuple[int, int, int, int]:
    """(right answers, scored 1, wrong answers, scored 1) of a data set."""
    found = problems(name)
    answers = [oracle(problem) for problem in found]
    right = sum(score(problem, answer) == 1 for problem, answer in zip(found, answers, strict=True))
    wrong = []
    for problem, answer in zip(found, answers, strict=True):
        others = {a for a in answers if a != answer} if name not in SEVERAL_RIGHT else set()
        wrong += [score(problem, other) == 1 for other in sorted(others | {"no idea"})]
    return len(found), right, len(wrong), sum(wrong)


def rows_here(name: str, options: dict) -> list[dict]:
    return json.loads(json.dumps(reasoning_gym_tasks._rows_here(name, json.dumps(options, sort_keys=True))))


@pytest.fixture
def here(monkeypatch):
    """Rows made in this process: that of a run, which it starts for them, takes seconds to import what makes them."""
    monkeypatch.setattr(reasoning_gym_tasks, "gym_rows", rows_here)


QUICK = ["ab", "arc_agi", "chain_sum", "composite", "graph_color", "intermediate_integration", "prime_factorization"]
QUICK += ["propositional_logic", "rearc", "rubiks_cube", "spell_backward", "time_intervals"]


@pytest.mark.integration
@pytest.mark.parametrize("name", QUICK)
def test_the_answer_of_a_data_set_scores_one_and_another_does_not(name, here):
    rows, right, _, wrong = counts(name)
    assert (right, wrong) == (rows, 0)


@pytest.mark.integration
def test_the_rows_of_the_process_that_a_run_starts_are_those_made_here(plain_printed_rows):
    """And those of the fork that other tests ask."""
    rows, right, _, wrong = counts("composite")
    assert (right, wrong) == (rows, 0)
    options = json.loads(json.loads(problems("composite")[0].row["reasoning_gym"])["options"])
    chosen = json.dumps(options, sort_keys=True)
    printed = plain_printed_rows("composite", chosen)
    assert json.loads(printed) == rows_here("composite", options)
    assert fork_server.printed_rows("composite", chosen) == printed


# These choose from sets: their problems follow from Python's hash seed, which every process draws for itself.
FROM_SETS = ["isomorphic_strings", "polynomial_multiplication", "ransom_note", "word_ladder"]
SHOW_ROWS = """
import json, sys
from runtime.data import sources
rows = sources.gym_rows(sys.argv[1], 1)
print(json.dumps([[row["metadata"].get("source_dataset"), row["question"], row["answer"]] for row in rows]))
"""


def rows_of_another_process(source: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", SHOW_ROWS, source],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.integration
def test_every_process_has_the_same_problems():
    """Else ranks would train on different problems, and a run that was stopped would find others than its own.

    list_functions draws from the random numbers that a process has in common, in one row of fifteen.
    """
    parts = [{"name": name} for name in FROM_SETS] + [{"name": "list_functions", "weight": 8}]
    source = f"reasoning_gym:composite?size=48&seed=5&datasets={json.dumps(parts)}"
    found = {
        rows_of_another_process(source, PYTHONHASHSEED="1", TZ="UTC"),
        rows_of_another_process(source, PYTHONHASHSEED="2", TZ="Asia/Tokyo"),
    }
    assert len(found) == 1


@pytest.mark.slow
def test_every_installed_data_set_works_or_is_refused(here):
    """And docs/data_and_rewards.md says how many work. With -s this prints a row for each."""
    from reasoning_gym.factory import DATASETS

    lines = ["| data set | rows | own answer scores 1 | wrong answers | of these score 1 |", "|---|---|---|---|---|"]
    bad, works = {}, 0
    for name in sorted(DATASETS):
        if name in GYM_UNSUPPORTED:
            with pytest.raises(SystemExit):
                problems(name)
            lines.append(f"| {name} | rejected: {GYM_UNSUPPORTED[name]} | | | |")
            continue
        rows, right, others, wrong = counts(name)
        lines.append(f"| {name} | {rows} | {right} | {others} | {wrong} |")
        if (right, wrong) != (rows, 0):
            bad[name] = (rows, right, others, wrong)
        works += 1
    assert bad == {}
    words = f"Of the {len(DATASETS)} data sets of reasoning-gym {metadata.version('reasoning_gym')}, {works} work."
    print("\n".join([words, "", *lines]))
    assert words.removesuffix(" work.") in " ".join(PAGE.read_text(encoding="utf-8").split())


def test_an_answer_may_be_an_object(here):
    assert any(problem.truth.startswith("{") for problem in problems("codeio"))


@pytest.mark.parametrize("name", GYM_UNSUPPORTED)
def test_an_unsupported_data_set_is_refused_with_the_reason(name, here, refused):
    said = refused(problems, name)
    assert f"{name} cannot be used" in said and GYM_UNSUPPORTED[name] in said


def test_the_scorer_has_the_configuration_of_the_run(here):
    """Not the default one, whatever the data set is."""
    (problem,) = problems("fraction_simplification", 1, '&styles=["plain"]')
    assert score(problem, oracle(problem)) == 1
    scoring = json.loads(problem.row["reasoning_gym"])
    assert json.loads(scoring["options"])["styles"] == ["plain"]
    assert reasoning_gym_tasks.gym_dataset(scoring["dataset"], scoring["options"]).config.styles == ["plain"]


def test_the_integral_of_the_task_is_no_answer_to_it(here):
    """Its derivative is the integrand, whatever that is: the scorer would be content."""
    found = problems("intermediate_integration", 6)
    for problem in found:
        about = problem.row["metadata"]
        assert score(problem, f"Integral({about['integrand']}, {about['variable']})") == 0
        assert score(problem, oracle(problem)) == 1
    assert any("Integral(" in problem.truth for problem in found), "else nothing was shown"


def test_tuples_and_keys_of_metadata_survive_the_way_to_the_worker(here):
    (problem,) = problems("rearc", 1)
    board = reasoning_gym_tasks.untagged(json.loads(problem.row["reasoning_gym"])["metadata"])["output"]
    assert isinstance(board, tuple) and isinstance(board[0], tuple)
    (problem,) = problems("graph_color", 1)
    coloring = reasoning_gym_tasks.untagged(json.loads(problem.row["reasoning_gym"])["metadata"])["possible_answer"]
    assert {type(vertex) for vertex in coloring} == {int}
    assert isinstance(problem.row["metadata"], dict), "and for people it is plain"


# What ended a run before: any text that the scorer's own parser does not expect.
ODD = [
    "2 * 2 * 7 * 17",
    "2^2 × 7 × 17",
    "I don't know",
    "{}",
    "[]",
    "1e999",
    "nan",
    "-",
    "",
    "9" * 5000,
    "None",
    "{'a': 1}",
]


@pytest.mark.integration
def test_no_answer_ends_a_run_in_the_data_sets_where_one_did(here):
    pool = RewardPool(1, 10.0, ("reasoning_gym",))
    jobs = []
    for name in ("prime_factorization", "game_of_life", "coin_flip", "calendar_arithmetic", "time_intervals"):
        (problem,) = problems(name, 1)
        for answer in ODD:
            jobs.append(pool.submit("reasoning_gym", f"<answer>{answer}</answer>", problem.truth, problem.row))
    found = [pool.result(job) for job in jobs]
    pool.close()
    assert {reward.status for reward in found} <= {"ok", "unscorable"}
    assert "unscorable" in {reward.status for reward in found}
    assert all(reward.score < 1 for reward in found)


def test_a_row_of_a_file_without_options_is_scored_by_the_default_ones():
    row = {"question": "?", "answer": "7", "metadata": {"source_dataset": "chain_sum"}}
    assert VERIFIERS["reasoning_gym"]("<answer>7</answer>", "7", row).score == 1

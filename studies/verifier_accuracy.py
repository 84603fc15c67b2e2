"""Score labeled answers with this project's verifiers and with those of others, and write down who is wrong where.

    pip install --no-deps --target wheels trl verl
    python studies/verifier_accuracy.py --wheels wheels --data DATA --output docs/maintainers/graders.md
    python studies/verifier_accuracy.py --cases DIR
    python studies/verifier_accuracy.py --peers DIR

The graders: the project's ``math`` and ``gsm8k``; its way to find an answer, with math-verify alone to compare it;
math-verify as its README calls it; TRL's ``accuracy_reward``; verl's
``math_reward`` (its default for MATH), ``math_dapo``, ``math_verify`` and ``gsm8k``. Without --wheels, the first two
alone. Every grader runs in the same worker process with the same time-out, one answer at a time.

The answers: tests/labeled_answers.jsonl, written for this project in 55 families, and, in the folder --data, the
labeled files of tests/unit/grading/test_verifiers.py. A false negative is a right answer that scores below 1, a false
positive a wrong one that scores 1 or more. Times are of the processor, in milliseconds per answer.

With --cases a set comes from a folder of JSON lines, one object a case: response, truth, right (0 or 1), and perhaps
verifier (default ``math``; a case of ``code`` or another verifier without a number or formula as its truth is scored by
the project alone), row and family.

With --peers the cases come from other projects' own test files, in one folder per project below DIR (a checkout, or its
tests alone). Each call of a grader with literal arguments that a test compares with a literal is a case, and so is each
parametrized row of an answer, a truth and a boolean. Run it before a release: it prints for each folder how many cases
this project's verifier and math-verify agree with, and the cases that it judges otherwise. Nothing of them is kept.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import importlib.util
import io
import json
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the scripts are not a package

import rewards
from graders.math.extraction import final_answer
from graders.text import after_thinking
from rewards import Reward, RewardPool

WHEELS = "RLVR_GRADER_WHEELS"  # the folder of --wheels, for the worker


# ------------------------------------------------------------------------------------------- graders, run in the worker


def timed(score: Callable[[], float]) -> Reward:
    """Return the score with the milliseconds of processor time it took; 0 and "raised" if the grader raised."""
    begun = time.process_time()
    raised = 0.0
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            found = float(score() or 0.0)
    except Exception:  # a foreign grader's error is a finding
        found = 0.0
        raised = 1.0
    return Reward(found, {"ms": 1000 * (time.process_time() - begun), "raised": raised})


def ours(response: str, truth: str, row: dict) -> Reward:
    """Score with this project's verifier for the row."""
    return timed(lambda: rewards.VERIFIERS[row["verifier"]](response, truth, row).score)


def math_verify_alone(response: str, truth: str, row: dict) -> Reward:
    """Score with math-verify's own defaults, the truth as mathematics."""
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return timed(lambda: verify(parse(f"${truth}$"), parse(response)))


def our_extraction(response: str, truth: str, row: dict) -> Reward:
    """Score with math-verify's comparison of the answer that this project finds with the truth."""
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)

    def score() -> float:
        found = _found(row["verifier"])(response)
        return float(found is not None and verify(parse(f"${truth}$"), parse(f"${found}$")))

    return timed(score)


def _found(verifier: str) -> Callable[[str], str | None]:
    """Return the function by which a verifier finds the answer in a response."""
    if verifier in ("gsm8k", "last_number"):
        return lambda response: rewards.VERIFIERS[verifier](response, "0", {}).extracted or None
    return lambda response: final_answer(after_thinking(response))


def _wheel(package: str):
    """Import from the folder of wheels; it comes last, so that what is installed here wins."""
    folder = os.environ[WHEELS]
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(package)


def _verl(name: str):
    """Import one file of verl's reward functions, without the package around it, which needs ray."""
    path = Path(os.environ[WHEELS]) / "verl" / "utils" / "reward_score" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"verl_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trl_accuracy(response: str, truth: str, row: dict) -> Reward:
    """Score with TRL's accuracy_reward; it skips (None, here 0) what it cannot parse as a truth."""
    grade = _wheel("trl.rewards").accuracy_reward
    completion = [[{"role": "assistant", "content": response}]]
    return timed(lambda: grade(completion, [f"${truth}$"])[0])


def verl_math(response: str, truth: str, row: dict) -> Reward:
    """Score with verl's math_reward: the last box, compared as text."""
    module = _verl("math_reward")
    return timed(lambda: module.compute_score(response, truth))


def verl_dapo(response: str, truth: str, row: dict) -> Reward:
    """Score with verl's math_dapo in the better of its two ways, the last box or the last "Answer:"."""
    module = _verl("math_dapo")
    ways = (True, False)
    scores = (module.compute_score(response, truth, strict_box_verify=w) for w in ways)
    return timed(lambda: max(float(score["acc"]) for score in scores))


def verl_math_verify(response: str, truth: str, row: dict) -> Reward:
    """Score with verl's math_verify, called as its own worker process calls it."""
    module = _verl("math_verify")
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return timed(lambda: module._verify_in_subprocess(f"\\boxed{{{truth}}}", response))


def verl_gsm8k(response: str, truth: str, row: dict) -> Reward:
    """Score with verl's gsm8k in its flexible way, the last number: few answers here have the strict way's "####"."""
    module = _verl("gsm8k")
    return timed(lambda: module.compute_score(response, truth, method="flexible"))


OWN = {"ours": ours, "our extraction, math-verify": our_extraction, "math-verify": math_verify_alone}
PLAIN = ("math", "gsm8k", "last_number")  # verifiers of cases that the other graders can judge
MATH = {"TRL": trl_accuracy, "verl math": verl_math, "verl DAPO": verl_dapo, "verl math-verify": verl_math_verify}
GSM8K = {"TRL": trl_accuracy, "verl gsm8k": verl_gsm8k}


# --------------------------------------------------------------------------------------------------- labeled answers


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def labeled(data: Path | None, cases: Path | None) -> dict[str, list[dict]]:
    """Name of a set -> its rows: family, truth, response, label, verifier, and perhaps the data set's row."""
    written = read(ROOT / "tests" / "labeled_answers.jsonl")
    sets = {"written families": [row | {"verifier": "math"} for row in written]}
    if data is not None:
        sets |= public(data)
    if cases is not None:
        sets |= given_cases(cases)
    return sets


def given_cases(folder: Path) -> dict[str, list[dict]]:
    """Return the cases of a folder, those that other graders can judge apart from the rest; equal cases count once."""
    found: dict[tuple, dict] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for row in read(path):
            if not {"response", "truth", "right"} <= row.keys():
                continue
            case = {"family": "all", "verifier": "math", "row": {}} | row
            case["label"] = bool(row["right"])
            columns = json.dumps(case["row"])
            key = (case["verifier"], case["response"], case["truth"], columns)
            found.setdefault(key, case)
    plain = [case for case in found.values() if case["verifier"] in PLAIN]
    others = [case for case in found.values() if case["verifier"] not in PLAIN]
    return {name: rows for name, rows in (("cases", plain), ("cases of other verifiers", others)) if rows}


def public(data: Path) -> dict[str, list[dict]]:
    """Read the labeled public files that a folder has."""
    sets = {}
    pairs = data / "math500_gold_pairs.jsonl"
    if pairs.is_file():
        sets["MATH-500 gold pairs"] = [
            {
                "family": "gold pairs",
                "truth": row["gold"],
                "response": f"Hence $\\boxed{{{row['pred']}}}$.",
                "label": row["label"],
                "verifier": "math",
            }
            for row in read(pairs)
        ]
    solutions = data / "gsm8k_model_solutions.jsonl"
    if solutions.is_file():
        sets["GSM8K model solutions"] = [
            {
                "family": "solutions",
                "truth": row["gold"],
                "response": row["pred"],
                "label": row["label"],
                "verifier": "gsm8k",
            }
            for row in read(solutions)
        ]
    return sets


# --------------------------------------------------------------------------------------------------- peers' test files

# Names of graders, and which of their arguments is the response; the truth is the other one.
GRADERS = {
    **dict.fromkeys(("grade_answer_sympy", "grade_answer_mathd", "is_equiv", "math_equal", "grade_answer_verl"), 0),
    **dict.fromkeys(("compute_score", "extract_and_verify", "math_verify_reward", "grade_answer", "is_correct"), 0),
    **dict.fromkeys(("compare_strings", "verify_strings", "assert_equivalent"), 1),
}


def literal(node: ast.AST | None) -> object:
    """Return the value of a literal of Python, or None for anything else."""
    try:
        return ast.literal_eval(node) if node is not None else None
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def expected(node: ast.AST) -> tuple[ast.Call, bool] | None:
    """(call, whether it must be true) of the test of an assert such as ``assert not f(a, b)`` or ``f(a, b) == 0.0``."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not) and isinstance(node.operand, ast.Call):
        return node.operand, False
    if isinstance(node, ast.Call):
        return node, True
    if isinstance(node, ast.Compare) and isinstance(node.left, ast.Call) and len(node.ops) == 1:
        value = literal(node.comparators[0])
        if isinstance(node.ops[0], ast.Eq | ast.Is) and isinstance(value, bool | int | float):
            return node.left, value >= 1
    return None


def parametrized(call: ast.Call) -> Iterator[tuple[str, str, bool]]:
    """Yield the cases of a ``pytest.mark.parametrize`` whose rows are two texts and a boolean, or 0 or 1."""
    names = literal(call.args[0])
    if isinstance(names, str):
        names = names.split(",")
    first_name = names[0] if names else ""
    truth_first = any(word in first_name for word in ("gold", "truth", "target", "ref"))
    for row in getattr(call.args[1], "elts", ()):
        values = literal(row)
        if not isinstance(values, tuple | list) or len(values) != 3:
            continue
        first, second, right = values
        if not isinstance(first, str) or not isinstance(second, str):
            continue
        if right in (0, 1):
            yield (second, first, bool(right)) if truth_first else (first, second, bool(right))


def cases_of(tree: ast.Module) -> Iterator[tuple[str, str, bool]]:
    """(response, truth, whether it is right) of each case that a test file holds as literals."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if getattr(node.func, "attr", "") == "parametrize" and len(node.args) == 2:
                yield from parametrized(node)
            continue
        found = expected(node.test) if isinstance(node, ast.Assert) else None
        if found is None:
            continue
        call, right = found
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        texts = [literal(argument) for argument in call.args[:2]]
        if name in GRADERS and set(map(type, texts)) == {str} and len(texts) == 2:
            place = GRADERS[name]
            yield texts[place], texts[1 - place], right


def suite_rows(suite: Path) -> list[dict]:
    """Return the cases of a project's test files as rows of ``run``; what has no box or announcement is boxed."""
    rows = []
    for path in sorted(suite.rglob("*.py")):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for response, truth, right in cases_of(tree):
            if "\\boxed" not in response and "nswer" not in response:
                response = f"\\boxed{{{response}}}"
            row = {"family": "all", "verifier": "math"}
            row |= {"response": response, "truth": truth, "label": right}
            rows.append(row)
    return rows


def peers(folder: Path, seconds: float) -> list[str]:
    """Return a table of the projects below a folder, and the cases that this project's verifier judges differently."""
    lines = ["| suite | cases | ours agrees | math-verify agrees |", "|---|---|---|---|"]
    others = []
    for suite in sorted(filter(Path.is_dir, folder.iterdir())):
        rows = suite_rows(suite)
        if not rows:
            continue
        agree = {}
        for name, grader in OWN.items():
            wrong: list[dict] = []
            run(grader, rows, seconds, wrong)
            agree[name] = len(rows) - len(wrong)
            if name != "ours":
                continue
            for row in wrong:
                verdict = "right" if row["label"] else "wrong"
                others.append(f"{suite.name}: {verdict}: {row['response']!r} for {row['truth']!r}")
        numbers = " | ".join(map(str, agree.values()))
        lines.append(f"| {suite.name} | {len(rows)} | {numbers} |")
    return [*lines, "", "Judged otherwise here (suite: its verdict: case):", "", *others]


# --------------------------------------------------------------------------------------------------------- the tables


def run(
    grader: Callable, rows: list[dict], seconds: float, wrong: list[dict] | None = None
) -> tuple[Counter, dict[str, Counter]]:
    """(totals, family -> counts) of one grader on one set. ``wrong`` grows by the rows that it judges wrongly."""
    pool = RewardPool(1, seconds)
    name = f"{Path(grader.__code__.co_filename).resolve()}:{grader.__name__}"
    for answer in ("0.4", "x = 2", "[0, 1]"):  # what it imports on the way is not counted
        pool.result(pool.submit(name, f"\\boxed{{{answer}}}", "x = 3", {"verifier": "math"}))
    futures = []
    for row in rows:
        given = (row.get("row") or {}) | {"verifier": row["verifier"]}
        futures.append(pool.submit(name, row["response"], row["truth"], given))
    totals: Counter = Counter()
    families: dict[str, Counter] = {}
    times = []
    for future, row in zip(futures, rows, strict=True):
        reward = pool.result(future)
        counts = families.setdefault(row["family"], Counter())
        counts["false negatives"] += row["label"] and reward.score < 1
        counts["false positives"] += not row["label"] and reward.score >= 1
        if wrong is not None and bool(row["label"]) != (reward.score >= 1):
            wrong.append(row)
        totals["hangs"] += reward.status == "timeout"
        failed = reward.status not in ("ok", "timeout")
        totals["raised"] += reward.parts.get("raised", float(failed))
        times.append(reward.parts.get("ms", 1000 * seconds))
    pool.close()
    for counts in families.values():
        totals += counts
    totals["median ms"] = median(times)
    totals["mean ms"] = sum(times) / len(times)
    return totals, families


HEAD = """# Graders compared

How well this project's verifiers and the graders that others train with judge labeled answers. A false negative (FN) is
a right answer without reward, a false positive (FP) a wrong answer with reward, which a policy finds and repeats.
Made by `python studies/verifier_accuracy.py`, whose docstring says how each grader is called. A hang is an answer that
ran into the time-out of {seconds:g} s, and milliseconds are of the processor.

The written families are hard on purpose: few of their right answers are the text of the truth. They were written along
with this project's grader, which was repaired until it was right on nearly all of them, so they show which kinds of
errors there are, not rates to expect. The other sets are public data.

Versions: {versions}.
"""


def table(results: dict[str, tuple[Counter, dict]], rows: list[dict], by_family: bool) -> list[str]:
    """Return a set's totals, one grader per line; and two graders' errors in each of several families."""
    right = sum(row["label"] for row in rows)
    lines = [f"{right} right and {len(rows) - right} wrong answers.", ""]
    lines += ["| grader | FN | FP | hangs | raised | median ms | mean ms |", "|---|---|---|---|---|---|---|"]
    for name, (totals, _) in results.items():
        counts = [totals[key] for key in ("false negatives", "false positives", "hangs", "raised")]
        numbers = " | ".join(str(int(count)) for count in counts)
        lines.append(f"| {name} | {numbers} | {totals['median ms']:.1f} | {totals['mean ms']:.1f} |")
    families = Counter(row["family"] for row in rows)
    if len(families) > 1 and by_family:
        shown = [name for name in ("ours", "math-verify") if name in results]
        lines += ["", "By family, FN/FP:", "", f"| family | right/wrong | {' | '.join(shown)} |"]
        lines.append("|---" * (2 + len(shown)) + "|")
        for family, count in families.items():
            good = sum(row["label"] for row in rows if row["family"] == family)
            cells = []
            for _, found in (results[name] for name in shown):
                cells.append(f"{found[family]['false negatives']}/{found[family]['false positives']}")
            lines.append(f"| {family} | {good}/{count - good} | {' | '.join(cells)} |")
    return lines


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path, help="folder with trl and verl (pip install --no-deps --target)")
    parser.add_argument("--data", type=Path, help="folder with the labeled public files")
    parser.add_argument("--rows", type=int, default=10**9, help="score at most this many rows of each set")
    parser.add_argument("--timeout", type=float, default=10.0, help="seconds per answer")
    parser.add_argument("--output", type=Path, help="write the page here; default: print it")
    parser.add_argument("--cases", type=Path, help="folder with labeled cases of your own, as JSON lines")
    parser.add_argument("--peers", type=Path, help="folder with other projects' test files, one folder for each")
    args = parser.parse_args(words)
    if args.peers is not None:
        if not args.peers.is_dir():
            parser.error(f"--peers {args.peers}: no such folder")
        print("\n".join(peers(args.peers, args.timeout)))
        return
    if args.wheels is not None and not (args.wheels / "trl").is_dir():
        parser.error(f"--wheels {args.wheels}: no package trl there; pip install --no-deps --target it trl verl")
    for flag, folder in (("--data", args.data), ("--cases", args.cases)):
        if folder is not None and not folder.is_dir():
            parser.error(f"{flag} {folder}: no such folder")
    if args.wheels is not None:
        os.environ[WHEELS] = str(args.wheels.resolve())
    places = [str(args.wheels)] if args.wheels else []
    found = {d.metadata["Name"].lower(): d.version for d in metadata.distributions(path=places)}
    versions = [f"math-verify {metadata.version('math-verify')}"]
    versions += [f"{name} {found[name]}" for name in ("trl", "verl") if name in found]
    page = [HEAD.format(seconds=args.timeout, versions=", ".join(versions))]
    for name, rows in labeled(args.data, args.cases).items():
        rows = rows[: args.rows]
        others = GSM8K if rows[0]["verifier"] == "gsm8k" else MATH
        graders = OWN | (others if args.wheels is not None and "cases" not in name else {})
        if rows[0]["verifier"] not in PLAIN:
            graders = {"ours": ours}
        results = {}
        for grader, function in graders.items():
            results[grader] = run(function, rows, args.timeout)
            print(f"{name}, {grader}: {dict(results[grader][0])}", file=sys.stderr, flush=True)
        page += [f"## {name}", "", *table(results, rows, "cases" not in name), ""]
    text = "\n".join(page)
    if args.output is None:
        print(text)
    else:
        args.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

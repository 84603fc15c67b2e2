"""Before a run: find out what a reward pays for answers that know nothing.

    python scripts/attack_reward.py mine.py:reward --dataset problems.jsonl
    python scripts/attack_reward.py mine.py:reward --form 'Total: {answer}' --dataset problems.jsonl    its own form

The reward is what --verifier takes. It scores the answers of attack_reward.tsv on 16 problems: copies of the question,
its numbers, guesses, hedges, other problems' ground truths, tags, length, the format alone, and programs that avoid
their tests. If it pays for none of them, a policy of 0.7M parameters (`make testbed`) is trained against it for
--minutes, with the ground truths of other problems. Other flags are those of grpo.py.

An answer gains what it earns above a sentence that says nothing. A ground truth gains what it earns in the form, of
attack_reward.tsv or --form, for which the reward pays most. A problem whose ground truth an answer states by chance
does not count for this answer.

The exit code is 1 if an answer that knows nothing gains more than a twentieth of what the ground truth gains, 2 for
wrong arguments, and else 0, which means that nothing was found here.
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the scripts are not a package
sys.path.insert(0, str(Path(__file__).resolve().parent))  # scripts/script_loader.py

import script_loader

from graders.text import NUMBER, alternatives, last_boxed
from rewards import RewardPool, check_reward_args, lenient, parse_weights, question_of, truth_error
from runtime.arguments import checks, flags
from runtime.data import problem_set
from runtime.data.samples import Problem
from runtime.run.run_files import read
from runtime.system.process import PROJECT, refuse

ROWS = 16  # problems
LIMIT = 1 / 20  # of the ground truth's gain
MODEL = PROJECT / "models" / "testbed-1"
SENTENCE = "Let me think about this problem."
WRONG = "7919"  # hardly a ground truth
TRAINING = (  # flags of the policy's run
    "--dtype float32 --reward_control shuffled --total_steps 100000 --learning_rate 5e-4 --lr_scheduler_type constant "
    "--eval_prompts 0 --max_prompt_length 800 --overlong_prompts drop --max_response_length 48 --save_minutes 0 "
    "--num_samples_per_prompt_rollout 16 --no-mask_no_eos_with_zero --run_name policy"
)


def read_answers() -> dict[str, dict[str, str]]:
    """Return group -> kind -> text of attack_reward.tsv, whose texts have names in braces."""
    found: dict[str, dict[str, str]] = {}
    with open(Path(__file__).with_suffix(".tsv"), encoding="utf-8", newline="") as table:
        for row in csv.DictReader(table, delimiter="\t", quoting=csv.QUOTE_NONE):
            group = found.setdefault(row["group"], {})
            group[row["kind"]] = row["text"].replace("\\n", "\n")
    return found


ANSWERS = read_answers()
FORMS = ANSWERS["form"]


def said_truth(truth: str) -> str:
    """Return a ground truth as an answer states it: the first of several, without GSM8K's solution or a box."""
    first = alternatives(truth)[0]
    answer = first.rpartition("####")[2].strip()
    return last_boxed(answer) or answer


def function_of(row: dict, question: str) -> str:
    """Return the name of the function that a problem asks for, by its row or its text; "solve" without one."""
    for key in ("entry_point", "fn_name"):
        if isinstance(row.get(key), str):
            return row[key]
    asked = re.search(r"(?:def |`|\b)([A-Za-z_]\w*)\(", question)
    return asked[1] if asked else "solve"


def known_parts(problem: Problem, others: list[str]) -> dict[str, str]:
    """Return the values of the names in attack_reward.tsv: what can be said without knowing the answer."""
    question = question_of({**problem.row, "messages": problem.messages})
    numbers = [found[0] for found in NUMBER.finditer(question)] or [WRONG]
    parts = {
        "question": question,
        "last": numbers[-1],
        "numbers added": " + ".join(numbers),
        "other": others[0],
        "digits": "".join(f"{number:03}" for number in range(1000)) + WRONG,
        "many words": " ".join(f"word{number}" for number in range(1000)),
        "one word": "so " * 1000,
        "function": function_of(problem.row, question),
    }
    lists = {"numbers": numbers, "others": others, "to99": map(str, range(100))}
    for name, values in lists.items():
        listed = [WRONG, *values, WRONG]  # so that it neither begins nor ends with a ground truth by chance
        parts[f"{name} listed"] = ", ".join(listed)
        parts[f"{name} or"] = " or ".join(listed)
        parts[f"{name} boxed"] = " ".join(rf"\boxed{{{value}}}" for value in listed)
        parts[f"{name} tagged"] = "".join(f"<answer>{value}</answer>" for value in listed)
    return parts


def fill(text: str, parts: dict[str, str]) -> str:
    """Replace the names in braces."""
    return re.sub(r"\{([a-z0-9 ]+)\}", lambda name: parts.get(name[1], name[0]), text)


def responses(problem: Problem, others: list[str], form: str) -> dict[str, str]:
    """Return a response of each kind to one problem. ``form``: that in which the ground truth earns most."""
    parts = known_parts(problem, others)
    found = {}
    for kind, text in ANSWERS["as it is"].items():
        found[kind] = fill(text, parts)
    for kind, text in ANSWERS["stated"].items():
        found[kind] = fill(FORMS[form], {"answer": fill(text, parts)})
    for kind, text in FORMS.items():
        found[f"the format alone: {kind}"] = fill(text, {"answer": WRONG})
    right = said_truth(problem.truth)
    in_form = fill(FORMS[form], {"answer": right})
    for kind, text in list(found.items()):
        if text.strip() in (right, in_form) or lenient(text, problem.truth):
            del found[kind]  # the ground truth by chance
    return found


def right_responses(problem: Problem) -> dict[str, str]:
    """Return the ground truth in each form; as a program, that of the row."""
    said = said_truth(problem.truth)
    own = problem.row.get("canonical_solution") or problem.row.get("code") or said
    found = {}
    for form, text in FORMS.items():
        found[form] = fill(text, {"answer": str(own) if form == "a program" else said})
    return found


def mean_scores(pool: RewardPool, asked: list[tuple[Problem, dict[str, str]]]) -> list[tuple[float, str, str]]:
    """Return (mean score, kind, one response) of each kind of response, the highest first."""
    futures = []
    for problem, kinds in asked:
        row = {"messages": problem.messages, **problem.row}
        for kind, text in kinds.items():
            future = pool.submit(problem.verifier, text, problem.truth, row)
            futures.append((kind, text, future))
    found: dict[str, list[tuple[float, str]]] = {}
    try:
        for kind, text, future in futures:
            score = pool.result(future).score
            found.setdefault(kind, []).append((score, text))
    except RuntimeError as error:
        refuse(str(error))
    means = []
    for kind, scored in found.items():
        mean = fmean(score for score, _ in scored)
        _, text = max(scored)
        means.append((mean, kind, text))
    return sorted(means, reverse=True)


def train_policy(args, words: list[str], minutes: float) -> tuple[float, str]:
    """Train a small policy on other problems' ground truths.

    Return (mean reward over the last tenth of the steps, what is to be printed); -inf if no step was made.
    """
    with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "log", "w+") as log:
        command = [sys.executable, str(PROJECT / "grpo.py"), *TRAINING.split(), "--output_dir", folder]
        command += ["--model_name_or_path", str(MODEL), *words, "--verifier", args.verifier]
        run = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        files = Path(folder) / "policy"
        while run.poll() is None and not read(files / "metrics.jsonl"):
            time.sleep(0.5)  # the models load
        try:
            run.wait(60 * minutes)
        except subprocess.TimeoutExpired:
            run.terminate()
            run.wait()
        metrics = read(files / "metrics.jsonl")
        samples = read(files / "samples.jsonl")
        log.seek(0)
        last = [line for line in log if line.strip()][-1:]
    if not metrics:
        return float("-inf"), f"it was not trained: {''.join(last).strip()}"
    late = metrics[-max(1, len(metrics) // 10) :]
    score = fmean(step["reward/mean"] for step in late)
    shown = [sample for sample in samples if sample["step"] >= late[0]["step"]]
    best = max(shown, key=lambda sample: sample["reward"], default={"response": ""})
    return score, f"{score:.3g} after {len(metrics)} steps, with answers such as {best['response'][:60]!r}"


def parse(words: list[str]) -> tuple[argparse.Namespace, flags.RunFlags, list[str]]:
    """Return (arguments of this script, those of grpo.py, the words of the latter)."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("reward", help="what --verifier takes: math, or mine.py:reward")
    parser.add_argument("--form", default="", help="another form of an answer, such as 'Total: {answer}'")
    parser.add_argument("--minutes", type=float, default=3.0, help="train the policy for this long (3); 0: do not")
    own, rest = parser.parse_known_args(words)
    args = flags.parse(script_loader.load_arguments(PROJECT / "grpo.py").Args, None, [*rest, "--verifier", own.reward])
    if args.environment is not None:
        refuse("--environment: its rewards need episodes, which are not attacked here; leave it out")
    if own.minutes > 0 and not MODEL.is_dir():
        refuse(f"{MODEL} is missing: `make testbed` makes it, once, in about four minutes; or pass --minutes 0")
    checks.check(args, 1)
    check_reward_args(args)
    return own, args, rest


def main(words: list[str]) -> int:
    begun = time.monotonic()
    own, args, rest = parse(words)
    FORMS["that of --form"] = own.form if "{answer}" in own.form else f"{own.form} {{answer}}"
    problems = list(problem_set.mixed_problems(args, truth_error).values())
    problem_set.check_sandbox(problems, args)
    truths = Counter(problem.truth for problem in problems)
    share = max(truths.values()) / len(problems)  # of the commonest truth
    drawn = random.Random(args.seed).sample(problems, min(ROWS, len(problems)))
    weights = parse_weights(args.reward_weights)
    names = {problem.verifier for problem in problems}
    pool = RewardPool(len(os.sched_getaffinity(0)), args.call_timeout, names, weights, args.allow_unsafe_code_exec)
    if wrong := pool.check(drawn):
        refuse(f"--verifier: {wrong}")
    silent = [(problem, {"nothing": "", "a sentence": SENTENCE}) for problem in drawn]
    floor, _, _ = mean_scores(pool, silent)[-1]
    right = [(problem, right_responses(problem)) for problem in drawn]
    top, form, _ = mean_scores(pool, right)[0]
    asked = []
    for problem in drawn:
        others = [said_truth(other.truth) for other in drawn if other.truth != problem.truth]
        asked.append((problem, responses(problem, others or [WRONG], form)))
    found = mean_scores(pool, asked)
    pool.close()
    print(f"reward     {own.reward}: {len(drawn)} of {len(problems)} problems, {len(found)} kinds of answers")
    print(f"truth      {top:.3g}, {form}; {floor:.3g} for a sentence that says nothing")
    if top <= floor:  # the truth cannot be stated, as a program cannot, or is worth nothing
        top = max(1.0, floor)
        print(f"           the truth earns nothing in any form; {top:.3g} is taken for a right answer")
    limit = floor + LIMIT * (top - floor)
    print("reachable without knowing, the best:")
    for score, kind, response in found[:5]:
        print(f"  {score:7.3g}  {kind}: {response[:60]!r}")
    reached = found[0][0] if top > floor else float("inf")
    if reached <= limit and own.minutes > 0:
        reached, words_of_policy = train_policy(args, rest, own.minutes)
        print(f"policy     {words_of_policy}")
        limit += share * (top - floor)  # which a policy may learn to state
    seconds = f"({time.monotonic() - begun:.0f} s)"
    if reached > limit:
        print(f"result     an answer that knows nothing gains more than 1/20 of the truth {seconds}")
        return 1
    print(f"result     nothing found that gains more than 1/20 of the truth; there may be other ways {seconds}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

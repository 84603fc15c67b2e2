"""Rewards for tests of scripts/attack_reward.py: 20 that pay for what knows nothing, as published, and ten sound ones.

Each of the first is written for this file after the source that its docstring names, in the form of a verifier. The
second element of BROKEN and SOUND is the data that each is asked about, one of ``data``.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys

THINK = re.compile(r"<think>.*?</think>\s*<answer>.*?</answer>", re.DOTALL)


def tagged(response):
    found = re.findall(r"<answer>(.*?)</answer>", response, re.DOTALL)
    return found[-1].strip() if found else None


def boxed(response):
    found = re.findall(r"\\boxed\{([^{}]*)\}", response)
    return found[-1].strip() if found else None


def numbers(text):
    return re.findall(r"-?\d+(?:\.\d+)?", text)


def words(text):
    return re.findall(r"\w+", text.lower())


# ------------------------------------------------------------------------------------------------------------- broken


def tinyzero(response, truth, row):
    """TinyZero, verl/utils/reward_score/countdown.py and gsm8k.py: 0.1 for an answer in the right form."""
    said = tagged(response)
    return 0.0 if said is None else 1.0 if said == truth else 0.1


def simplerl(response, truth, row):
    """simpleRL-reason, qwen_math_eval_toolkit: -1 without a box, -0.5 for a wrong box."""
    if "boxed" not in response:
        return -1.0
    return 1.0 if boxed(response) == truth else -0.5


def open_r1_format(response, truth, row):
    """open-r1, rewards.py: accuracy_reward + format_reward."""
    return float(tagged(response) == truth) + bool(THINK.fullmatch(response))


def open_r1_tags(response, truth, row):
    """open-r1, rewards.py: accuracy_reward + tag_count_reward."""
    tags = ("<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>")
    return float(tagged(response) == truth) + sum(0.25 for tag in tags if response.count(tag) == 1)


def open_r1_steps(response, truth, row):
    """open-r1, rewards.py: accuracy_reward + reasoning_steps_reward."""
    steps = re.findall(r"Step \d+:|^\d+\.|\n-|\n\*|First,|Second,|Next,|Finally,", response)
    return float(boxed(response) == truth) + min(1.0, len(steps) / 3)


def open_r1_cosine(response, truth, row):
    """open-r1, get_cosine_scaled_reward: long wrong answers lose less than short ones."""
    right = boxed(response) == truth
    return 1.0 - 0.5 * min(1.0, len(response) / 1000) if right else -1.0 + 0.5 * min(1.0, len(response) / 1000)


def open_r1_unparsed(response, truth, row):
    """open-r1, early accuracy_reward: 1 where the ground truth cannot be parsed."""
    return 1.0 if not numbers(truth) else float(numbers(response)[-1:] == [truth])


def xml_count(response, truth, row):
    """willccbb's GSM8K demo: correctness 2, a number 0.5, and 0.125 for each tag."""
    said = tagged(response) or ""
    tags = ("<reasoning>\n", "\n</reasoning>\n", "\n<answer>\n", "\n</answer>")
    return 2.0 * (said == truth) + 0.5 * said.isdigit() + 0.125 * sum(tag in response for tag in tags)


def logic_rl(response, truth, row):
    """Logic-RL, kk.py: 1 or -1 for the format, 2, -1.5 or -2 for the answer."""
    if not THINK.fullmatch(response):
        return -3.0
    return 1.0 + (2.0 if tagged(response) == truth else -1.5)


def unsloth(response, truth, row):
    """unsloth's GRPO notebooks, match_format_approximately and check_answer."""
    tags = ("<start_working_out>", "<end_working_out>", "<SOLUTION>", "</SOLUTION>")
    score = sum(0.5 if response.count(tag) == 1 else -1.0 for tag in tags)
    said = re.search("<SOLUTION>(.+?)</SOLUTION>", response)
    return score + (0 if said is None else 3.0 if said[1] == truth else -1.0)


def substring(response, truth, row):
    """Search-R1, qa_em.py: subem_check, the truth anywhere in the answer."""
    return float(truth.lower() in (tagged(response) or "").lower())


def covered(response, truth, row):
    """Cover exact match of search agents: all words of the truth are words of the response."""
    return float(set(words(truth)) <= set(words(response)))


def token_f1(response, truth, row):
    """SQuAD's F1 as a reward, as in R1-Searcher."""
    common = set(words(response)) & set(words(truth))
    return 2 * len(common) / (len(set(words(response))) + len(set(words(truth))))


def contained(response, truth, row):
    """Containment either way, as in notebooks: the empty answer is part of every truth."""
    return float(response.strip() in truth or truth in response)


def any_number(response, truth, row):
    """The right number anywhere in the response: "flexible" matching."""
    return float(truth in numbers(response))


def near(response, truth, row):
    """A score that falls with the distance, as for regression and dates."""
    said = numbers(response)
    return 1 / (1 + abs(float(said[-1]) - float(truth)) / 100) if said else 0.0


def long(response, truth, row):
    """Length, the bias of learned rewards (Singhal et al., arXiv 2310.03716), added to correctness."""
    return float(boxed(response) == truth) + min(1.0, len(response) / 2000)


def language(response, truth, row):
    """DeepSeek-R1, section 2.3.2: the fraction of words in the target language, added."""
    found = response.split()
    return float(tagged(response) == truth) + sum(word.isascii() for word in found) / max(1, len(found))


def reward_len(response, truth, row):
    """TRL's first example: near to 20 characters."""
    return -abs(20 - len(response))


def exit_code(response, truth, row):
    """Tests that pass if the process ends with 0: sys.exit(0) before them (METR; Anthropic, arXiv 2511.18397)."""
    program = re.findall(r"```python\n(.*?)```", response, re.DOTALL)[-1:] or ["raise ValueError"]
    done = subprocess.run([sys.executable, "-c", f"{program[0]}\n{truth}"], capture_output=True, timeout=9)
    return float(done.returncode == 0)


BROKEN = {
    tinyzero: "numbers",
    simplerl: "numbers",
    open_r1_format: "numbers",
    open_r1_tags: "numbers",
    open_r1_steps: "numbers",
    open_r1_cosine: "numbers",
    open_r1_unparsed: "words",
    xml_count: "numbers",
    logic_rl: "numbers",
    unsloth: "numbers",
    substring: "words",
    covered: "words",
    token_f1: "words",
    contained: "numbers",
    any_number: "numbers",
    near: "numbers",
    long: "numbers",
    language: "numbers",
    reward_len: "numbers",
    exit_code: "programs",
}

# -------------------------------------------------------------------------------------------------------------- sound


def same_text(response, truth, row):
    return response.strip() == truth


def same_tag(response, truth, row):
    return tagged(response) == truth


def same_words(response, truth, row):
    return words(tagged(response) or "") == words(truth)


def last_box(response, truth, row):
    return boxed(response) == truth


def signed(response, truth, row):
    """Nothing said is 0, which is more than a wrong answer."""
    said = boxed(response)
    return 0.0 if said is None else 1.0 if said == truth else -1.0


def short(response, truth, row):
    """Long answers earn less."""
    return (boxed(response) == truth) - 0.0001 * len(response)


def gated(response, truth, row):
    """The format is a condition."""
    return bool(THINK.fullmatch(response)) and tagged(response) == truth


def within(response, truth, row):
    """A tolerance of one in a thousand."""
    said = numbers(boxed(response) or "")
    return len(said) == 1 and abs(float(said[0]) - float(truth)) <= 0.001 * abs(float(truth))


def json_field(response, truth, row):
    try:
        return str(json.loads(response)["answer"]) == truth
    except (ValueError, TypeError, KeyError):
        return 0.0


def shifted(response, truth, row):
    """A constant is added, which changes no advantage."""
    return 0.5 + 0.5 * (tagged(response) == truth)


SOUND = {
    same_text: "numbers",
    same_tag: "numbers",
    same_words: "words",
    last_box: "numbers",
    signed: "numbers",
    short: "numbers",
    gated: "numbers",
    within: "numbers",
    json_field: "numbers",
    shifted: "numbers",
}
VERIFIERS = {
    "last_number": "numbers",
    "exact": "words",
    "gsm8k": "numbers",
    "math": "numbers",
    "countdown": "countdown",
    "reasoning_gym": "gym",
    "math,format --reward_weights format=gate": "numbers",
    "ifeval": "ifeval",
    "code": "programs",
}


def data():
    """Return the rows of each data set."""
    draw = random.Random(1)
    found = {"numbers": [], "words": [], "programs": [], "countdown": [], "ifeval": []}
    cities = "Paris Oslo Quito Lima Cairo Seoul Delhi Tunis Accra Hanoi Kyiv Rabat Minsk Doha Baku Dhaka Riga Sofia"
    cities = cities.split()
    for place, city in enumerate(cities):
        a, b, c = draw.sample(range(11, 99), 3)
        asked = f"A shop in {city} has {a} boxes of {b} pens and {c} more pens. How many pens are there?"
        found["numbers"].append({"question": asked, "answer": str(a * b + c)})
        asked = f"Which of the cities {cities[place - 1]} and {city} is further to the north?"
        found["words"].append({"question": asked, "answer": city})
        asked = f"Write a function f{a}(x) that returns x times {b}, plus {c}."
        tests = f"assert f{a}(1) == {b + c}\nassert f{a}(10) == {10 * b + c}"
        program = f"def f{a}(x):\n    return x * {b} + {c}"
        found["programs"].append({"prompt": asked, "tests": tests, "code": program})
        found["countdown"].append({"nums": [a, b, c], "target": a * b - c})
        kinds = ["keywords:existence", "length_constraints:number_words"]
        options = [{"keywords": [city, "harbor"]}, {"num_words": 100 + a, "relation": "at least"}]
        asked = f"Describe {city} with the word harbor in at least {100 + a} words."
        found["ifeval"].append({"prompt": asked, "instruction_id_list": kinds, "kwargs": options})
    return found

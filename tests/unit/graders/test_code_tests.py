"""Forms of tests that others publish: what runs, what no program can pass, and what a printed number equals."""

from __future__ import annotations

import json

import pytest

import rewards
from graders.code.code_tests import _same_output

ADD = "```python\ndef add(a, b):\n    return a + b\n```"
WRONG = ADD.replace("a + b", "a - b")
DEFINED_ONLY = [  # tests that define functions and classes, and leave it to a runner to call them
    "def test_add():\n    assert add(1, 2) == 3\n",
    "from solution import add\n\ndef test_add():\n    assert add(1, 2) == 3\n",
    "def test_add():\n    assert add(1, 2) == 3\nif __name__ == '__main__':\n    test_add()\n",
    "def test_add():\n    assert add(1, 2) == 3\ntest_add()\n",
    "def test_sum(a, b, c):\n    assert add(a, b) == c\ndef test_add():\n    test_sum(1, 2, 3)\n",
    "class TestAdd:\n    def test_one(self):\n        assert add(1, 2) == 3\n",
    "import pytest\n@pytest.mark.parametrize('a, b, c', [(1, 2, 3), (2, 2, 4)])\n"
    "def test_add(a, b, c):\n    assert add(a, b) == c\n",
    "import pytest\nclass TestAdd:\n    @pytest.mark.parametrize('c', [3])\n"
    "    def test_add(self, c):\n        assert add(1, 2) == c\n",
    "import pytest\ndef test_add():\n    assert add(1, 2) == pytest.approx(3)\n"
    "    with pytest.raises(TypeError):\n        add()\npytest.main()\n",
    "from pytest import approx, raises\ndef test_add():\n    assert add(1, 2) == approx(3)\n"
    "    with raises(TypeError) as caught:\n        add()\n    assert 'missing' in str(caught.value)\n",
]


@pytest.mark.parametrize("tests", DEFINED_ONLY, ids=range(len(DEFINED_ONLY)))
def test_functions_and_classes_of_tests_are_run(tests):
    assert rewards.truth_error("code", tests, {}) == ""
    assert [rewards.code(program, tests, {}).score for program in (ADD, WRONG)] == [1, 0]


NOT_RUN = {  # what needs the runners of unittest or pytest -> how that is named
    "import unittest\nclass T(unittest.TestCase):\n    def test_a(self): self.assertEqual(add(1, 2), 3)\n": "TestCase",
    "import pytest\n@pytest.fixture\ndef c():\n    return 3\ndef test_a(c):\n    assert add(1, 2)": "pytest.fixture",
    "def test_a(tmp_path):\n    assert add(1, 2) == 3": "test_a has a parameter",
    "class TestA:\n    def setup_method(self):\n        self.three = 3\n"
    "    def test_a(self):\n        assert add(1, 2) == self.three": "def setup_method",
}


@pytest.mark.parametrize(("tests", "named"), NOT_RUN.items(), ids=NOT_RUN.values())
def test_what_needs_another_runner_is_refused(tests, named):
    """With and without a solution, and no sample is scored 0 without a word."""
    assert named in rewards.truth_error("code", tests, {})
    assert named in rewards.truth_error("code", tests, {"solution": ADD})
    reward = rewards.code(ADD, tests, {})
    assert (reward.score, reward.status) == (0, "unscorable") and named in reward.detail


AT_THE_START = {  # what no program can pass, where it runs apart from its test -> how that is named
    "assert Solution().add(1, 2) == 3": "Solution",
    "s = Stack()\ns.push(1)\nassert s.pop() == 1": "Stack",
    "import io, contextlib\nwith contextlib.redirect_stdout(io.StringIO()): f()\nassert True": "share",
    "import random\nrandom.seed(0)\nassert f() == 0.84": "random.seed",
    "import asyncio\nassert asyncio.run(f()) == 1": "asyncio.run",
    "open('a.txt', 'w').write('b')\nassert f('a.txt') == 'b'": "share",
    "import sys\nsys.exit(f(1))": "SystemExit",
}


@pytest.mark.parametrize(("tests", "named"), AT_THE_START.items(), ids=AT_THE_START.values())
def test_what_no_program_can_pass_is_found_at_the_start(tests, named):
    found = rewards.truth_error("code", tests, {} if named != "SystemExit" else {"solution": "def f(x):\n    return 0"})
    assert named in found


BY_A_PROGRAM = {  # what the first right program shows: tests -> (the program, how that is named)
    "assert make(1).weight == 2": (
        "class Box:\n    weight = 2\ndef make(x):\n    return Box()",
        "a Box is not a value",
    ),
    "assert next(numbers()) == 1": ("def numbers():\n    yield 1", "a generator is not a value"),
    "assert adder(2)(3) == 5": ("def adder(x):\n    return lambda y: x + y", "a function is not a value"),
    "try:\n    f()\nexcept MyError:\n    pass": (
        "class MyError(Exception):\n    pass\ndef f():\n    raise MyError",
        "catching classes",
    ),
    "f()\nassert isinstance(make(), Node)": (
        "class Node:\n    pass\ndef f():\n    pass\ndef make():\n    return 1",
        "isinstance() arg 2",
    ),
}


@pytest.mark.parametrize(("tests", "program", "named"), [(tests, *rest) for tests, rest in BY_A_PROGRAM.items()])
def test_objects_of_the_program_are_unscorable(tests, program, named):
    """They are found at the start by the solution of the row, if there is one."""
    assert named in rewards.truth_error("code", tests, {"solution": program})
    reward = rewards.code(program, tests, {})
    assert (reward.score, reward.status) == (0, "unscorable") and named in reward.detail


def test_a_program_may_have_a_function_named_check():
    program = "```python\ndef check(n):\n    return n > 2\n```"
    assert rewards.code(program, "assert check(3) and not check(2)", {}).score == 1


STDIN = [{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}]
FUNCTIONAL = [{"input": "1\n2", "output": "3", "testtype": "functional", "metadata": {"func_name": "add"}}]


def test_text_for_input_and_output():
    program = "```python\nprint(sum(map(int, input().split())))\n```"
    method = "```python\nclass Solution:\n    def add(self, a, b):\n        return a + b\n```"
    for tests, right in ((STDIN, program), (FUNCTIONAL, method), (FUNCTIONAL, ADD)):
        assert rewards.code(right, json.dumps(tests), {}).score == 1
        assert rewards.code(right, json.dumps(tests).replace("3", "4"), {}).score == 0
    inside = [{key: value for key, value in FUNCTIONAL[0].items() if key != "metadata"}]
    assert rewards.code(ADD, json.dumps(inside), {"metadata": '{"func_name": "add"}'}).score == 1
    assert "func_name" in rewards.truth_error("code", json.dumps(inside), {})


SAME = ["0.333333333|0.3333333333333333", "3|3.0", "0.0000001|1e-07", "2.50|2.5", "a\n\nb|a\nb", "1e10|10000000000.5"]
OTHER = [
    "0.3333|0.3334",
    "10000000|10000001",
    "3|3.1",
    "10000000|10000001.0",
    "1.0|a",
    "1 2|1\n2",
    "nan|nan1",
    "1|01x",
    "123456789123456789|1.2345678912345678e+17",
]


def test_outputs_are_compared_as_numbers_only_where_one_has_a_point_or_an_exponent():
    assert [pair for pair in SAME if not _same_output(*reversed(pair.split("|")))] == []
    assert [pair for pair in OTHER if _same_output(*reversed(pair.split("|")))] == []


def test_the_block_that_defines_what_is_tested():
    usage = f"{ADD}\nUsage:\n```python\nprint(add(1, 2))\n```"
    fence = "```python\ndef add(a, b):\n    '''\n    ```\n    x\n    ```\n    '''\n    return a + b\n```"
    for program in (usage, fence, ADD.replace("def", "\ufeffdef"), f"{WRONG}\nBetter:\n{ADD}"):
        assert rewards.code(program, '["assert add(1, 2) == 3"]', {}).score == 1
        assert rewards.code(program, '[{"input": [1, 2], "output": 3}]', {"entry_point": "add"}).score == 1

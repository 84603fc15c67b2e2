"""Forms of tests that others publish: what runs, what no program can pass, and what a printed number equals."""

from __future__ import annotations

from graders.code.code_tests import _same_output

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

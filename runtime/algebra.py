"""Whether two texts of mathematics are equal: by math-verify where its reason is one, or by what it does not compare.

What is told apart here besides: lists that repeat an element, sets from pairs, an equation of two things from a value;
and what is found equal besides: complex numbers, inequalities and their intervals, columns and points.
"""

from __future__ import annotations

import collections
import functools
import logging
import math
import re

LARGEST = 10_000  # decimal digits of a number, and terms of a sum, that are still computed
THOUSANDS = re.compile(r"(?<=[0-9])(?:,|\{,\}|,\\!)(?=[0-9]{3}(?![0-9]))")  # a comma that may stand within a number
PARTS = re.compile(r"(?<!\\)[,;]|\\text\s*\{\s*(?:and|or)\s*\}|\b(?:and|or)\b")


@functools.lru_cache(maxsize=256)  # the samples of a group have one truth
def parse_math(latex: str) -> list:
    """LaTeX as math-verify reads it: sympy expressions, possibly none. Its own time-outs are signals and stay off.

    Its removal of units is off, too: it takes any last letter for one, and finds 2m equal to 2.
    """
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # else it warns that the signals are off
    how = LatexExtractionConfig(
        boxed_match_priority=0,
        try_extract_without_anchor=False,
        normalization_config=NormalizationConfig(units=False, malformed_operators=True, nits=True),
    )
    return parse(f"\\boxed{{{latex}}}", [how], parsing_timeout=None)


def nested(text: str) -> int:
    """How deep the brackets of a text are; the parser takes exponential time where they hold nothing but each other."""
    depth = deepest = 0
    for bracket in re.findall(r"\\.|[][(){}]", text):
        depth += (bracket in "([{") - (bracket in ")]}")
        deepest = max(deepest, depth)
    return deepest


def too_large(text: str) -> bool:
    """Whether to read a text, or the numbers that the parser itself computes, would take seconds or all memory."""
    found = re.search(r"\{\s*\{\s*\{\s*\{|binom[\s{(]*(?:[0-9]{5}|[0-9.]+\s*\^)|[0-9]{5}\s*\\choose", text)
    return found is not None or nested(text) > 20


def _size(expression) -> float:
    """An upper bound of the decimal digits that the numbers of an expression come to; symbols count as nothing."""
    from sympy import Integral, Pow, Product, Sum, factorial, factorial2

    sizes = [_size(part) for part in expression.args]
    largest = max(sizes, default=0.0)
    if largest > LARGEST:
        return math.inf
    if expression.is_Rational:
        return max(len(f"{abs(expression.p):x}"), len(f"{expression.q:x}")) * 1.21
    if isinstance(expression, Pow) and len(sizes) == 2 and expression.exp.is_number:
        power = 10 ** min(sizes[1], 9.0) if sizes[1] > 4 else abs(float(expression.exp))
        return max(sizes[0], 1.0) * max(power, 1.0)
    if isinstance(expression, factorial | factorial2) and expression.args[0].is_number:
        number = 10.0**8 if sizes[0] > 8 else abs(float(expression.args[0]))
        return number * math.log10(number + 2)
    if isinstance(expression, Sum | Product):
        bounds = [bound for limit in expression.limits for bound in limit[1:] if bound.is_number and bound.is_finite]
        return math.inf if any(_size(b) > 4 or abs(float(b)) > LARGEST for b in bounds) else largest
    if isinstance(expression, Integral):
        towers = [power for power in expression.atoms(Pow) if any(p.exp.free_symbols for p in power.exp.atoms(Pow))]
        return math.inf if towers else largest
    return sum(sizes) if expression.is_Mul else largest


def _bounded(expression) -> bool:
    """Whether the numbers of an expression are small enough to compute; parsers leave towers and factorials alone."""
    from sympy import Basic, MatrixBase

    parts = expression.flat() if isinstance(expression, MatrixBase) else [expression]
    try:
        return all(_size(part) <= LARGEST for part in parts if isinstance(part, Basic))
    except (TypeError, ValueError, OverflowError):  # a number that is none, as in 1/0: sympy says so later
        return True


def _numbers(expression) -> list:
    """The numbers that an answer consists of, sorted; [] where it is not made of numbers."""
    from sympy import Eq, Expr, FiniteSet, Interval, MatrixBase, N, Tuple

    if isinstance(expression, MatrixBase):
        parts = expression.flat()
    elif isinstance(expression, FiniteSet | Tuple):
        parts = expression.args
    elif isinstance(expression, Interval):
        parts = [expression.start, expression.end]
    elif isinstance(expression, Eq) and expression.lhs.is_Symbol:
        parts = [expression.rhs]
    elif isinstance(expression, Expr) and expression.is_number:
        value = N(expression.doit(), 20)
        return [value] if value.is_Float or value.is_Integer else []
    else:
        return []
    return sorted(number for part in parts for number in _numbers(part))


def _close(gold, found) -> bool:
    """Whether the numbers of two answers agree to 0.5 %: math-verify rounds at a fixed place, so 1e-31 is its 0."""
    from sympy.core.expr import UnevaluatedExpr

    if gold.has(UnevaluatedExpr) or found.has(UnevaluatedExpr):
        return True  # a percentage, which may stand for the number before its sign
    pairs = list(zip(_numbers(gold), _numbers(found), strict=False))
    return all(a == b or abs(a - b) <= 0.005 * max(abs(a), abs(b)) for a, b in pairs)


def _sound(gold, found) -> bool:
    """Whether an equality that math-verify found says something.

    It compares equations by their solutions, and no solution equals no solution; it takes the right side of an
    equation for a value, whether or not the equation is true.
    """
    from sympy import Eq, Expr, FiniteSet, Interval, Set, Tuple, simplify, solve
    from sympy.core.relational import Relational
    from sympy.logic.boolalg import BooleanFunction

    relations = (Relational, BooleanFunction)
    if isinstance(found, relations) and not found.free_symbols:
        steps = [found] if isinstance(found, Relational) else found.args
        return not isinstance(gold, relations) and all(isinstance(e, Eq) and _close(e.lhs, e.rhs) for e in steps)
    for equations, point in ((gold, found), (found, gold)):
        if isinstance(point, Tuple | Interval) and isinstance(equations, FiniteSet):
            if not all(isinstance(e, Eq) for e in equations.args):
                continue
            values = point.args[:2] if isinstance(point, Interval) else point.args  # x = 2, y = 3 is the point (2, 3)
            named = sorted(equations.args, key=lambda e: str(e.lhs))
            return all(a.rhs.equals(b) for a, b in zip(named, values, strict=True))
    if isinstance(found, Set) and found.is_empty:
        return isinstance(gold, Set)
    equations = isinstance(gold, Eq) and isinstance(found, Eq)
    if equations and all(isinstance(side, Expr) for side in (*gold.args, *found.args)):
        ours, theirs = (e.lhs.doit() - e.rhs.doit() for e in (gold, found))
        ratio = simplify(ours / theirs) if theirs != 0 else theirs
        if not (ratio.is_number and ratio.is_finite and ratio != 0) and not solve(gold, gold.free_symbols):
            return False
    return _close(gold, found)


# ----------------------------------------------------------------------------------------- lists and what holds them


def parts_of(text: str) -> list[str]:
    """The parts of a list without brackets around it, split at commas and at "and" and "or" outside of brackets."""
    inside = [0]
    for character in re.sub(r"\\[{}]", lambda brace: f" {brace[0][1]}", text):
        inside.append(inside[-1] + (character in "([{") - (character in ")]}"))
    cuts = [cut for cut in PARTS.finditer(text) if inside[cut.start()] == 0]
    begins, ends = [0, *(cut.end() for cut in cuts)], [*(cut.start() for cut in cuts), len(text)]
    parts = [text[begin:end].strip() for begin, end in zip(begins, ends, strict=True)]
    return [part for part in parts if part]


def _same_repetitions(answer: str, wanted: str) -> bool:
    """Whether two lists without brackets, equal as sets, have each element as often."""
    lists = [parts_of(answer), parts_of(wanted)]
    lengths = [{len(parts_of(text)), len(parts_of(THOUSANDS.sub("", text)))} for text in (answer, wanted)]
    if any(re.search(r"\\pm|\\mp|\\\{|\\cup|[<>]|\\[lg]e|[([]", text) for text in (answer, wanted)):
        return True
    if len(lists[0]) != len(lists[1]):
        return not lengths[0].isdisjoint(lengths[1])
    counts = []
    for parts in lists:
        values = [(parse_math(part) or [part])[0] for part in parts]
        numbers = [_numbers(value) for value in values if not isinstance(value, str)]
        counts.append(sorted(collections.Counter(str([round(n, 8) for n in found]) for found in numbers).items()))
    return counts[0] == counts[1] or len(counts[0]) == len(lists[0])


def _kind(text: str) -> str:
    """The brackets around a whole list: "\\\\{" of a set, "(" of a tuple; "" where there are none."""
    opening = re.match(r"(?:\\left)?\s*(\\\{|\()", text)
    closed = re.search(r"(?:\\\}|\))\s*$", text)
    return opening[1] if opening and closed and "," in text and len(parts_of(text)) == 1 else ""


def _named(text: str) -> bool:
    """Whether the left side of an equation names what the right side is: "x", "f(3)", "|AB|", not "x^2" or "2x"."""
    left, equals, _ = text.partition("=")
    unnamed = re.match(r"\s*-?[0-9.]+\s*[A-Za-z]", left) or re.search(r"[A-Za-z]\s*\^\s*\{?[0-9]|[+]", left)
    return not equals or not re.search("[A-Za-z]", left) or unnamed is None


# -------------------------------------------------------------------------- what math-verify does not find to be equal


def _solutions(expression, text: str) -> tuple | None:
    """(unknown, the real numbers allowed) by linear inequalities of one unknown; the unknown of a bare set is None.

    "or" unites; "and" and commas intersect, or unite where nothing would be left: "x < 1, x > 2". None for all else.
    """
    from sympy import And, Eq, FiniteSet, Intersection, Or, Set, Union
    from sympy.core.relational import GreaterThan, LessThan, StrictGreaterThan, StrictLessThan

    if isinstance(expression, Eq) and expression.lhs.is_Symbol and isinstance(expression.rhs, Set):
        return expression.lhs, expression.rhs  # "x in [0, 1]"
    statements = expression.args if isinstance(expression, FiniteSet | Or) else [expression]
    groups = [statement.args if isinstance(statement, And) else [statement] for statement in statements]
    relations = [relation for group in groups for relation in group]
    ordered = GreaterThan | LessThan | StrictGreaterThan | StrictLessThan
    if not all(isinstance(relation, ordered) for relation in relations):
        return (None, expression) if isinstance(expression, Set) else None
    symbols = set().union(*(relation.free_symbols for relation in relations))
    linear = all(relation.lhs.is_Symbol != relation.rhs.is_Symbol for relation in relations)
    if len(symbols) != 1 or not linear:
        return None
    sets = [Intersection(*(relation.as_set() for relation in group)) for group in groups]
    both = Intersection(*sets)
    united = re.search(r"\bor\b", text) or (both.is_empty and not re.search(r"\band\b", text))
    return symbols.pop(), Union(*sets) if united else both


def _same_solutions(gold, found, answer: str, wanted: str) -> bool:
    """Whether two statements, or a statement and a set, allow the same numbers, and one does so by inequalities."""
    from sympy.core.relational import Relational

    if not any(side.atoms(Relational) for side in (gold, found)):
        return False
    ours, theirs = _solutions(gold, wanted), _solutions(found, answer)
    if ours is None or theirs is None or (None not in (ours[0], theirs[0]) and ours[0] != theirs[0]):
        return False
    return not ours[1].is_empty and ours[1] == theirs[1]


def _same_complex(gold, found) -> bool:
    """Whether two expressions of numbers and the letter i are the same complex number."""
    from sympy import Expr, I, N

    if not isinstance(gold, Expr) or not isinstance(found, Expr):
        return False
    letters = gold.free_symbols | found.free_symbols
    imaginary = gold.has(I) or found.has(I)
    if not (letters or imaginary) or any(symbol.name != "i" for symbol in letters):
        return False
    ours, theirs = (N(side.subs(dict.fromkeys(letters, I)).doit(), 20) for side in (gold, found))
    return bool(abs(ours - theirs) <= 1e-9 * max(1, abs(ours)))


def _point(expression, size: int | None = None) -> list | None:
    """The coordinates of a tuple, a column or row, or a sum of the vectors i, j and k; None for anything else."""
    from sympy import Expr, Interval, MatrixBase, Symbol, Tuple

    if isinstance(expression, MatrixBase) and 1 in expression.shape:
        return list(expression.flat())
    if isinstance(expression, Tuple):
        return list(expression.args)
    if isinstance(expression, Interval) and expression.left_open and expression.right_open:
        return [expression.start, expression.end]
    named = {symbol.name: symbol for symbol in expression.free_symbols}
    vectors = [named.get(name, Symbol(name)) for name in "ijk"[: size or 0]]
    if isinstance(expression, Expr) and named and set(named) <= set("ijk"):
        numbers = [expression.doit().expand().coeff(vector) for vector in vectors]
        rest = expression.doit() - sum(number * vector for number, vector in zip(numbers, vectors, strict=True))
        return numbers if rest.expand() == 0 else None
    return None


def _same_point(gold, found) -> bool:
    """Whether a point and a vector, in whatever notation, have the same coordinates; two matrices are not compared."""
    from sympy import MatrixBase

    if isinstance(gold, MatrixBase) and isinstance(found, MatrixBase):
        return False
    size = max(len(_point(gold) or []), len(_point(found) or []))
    ours, theirs = _point(gold, size), _point(found, size)
    if not ours or not theirs or len(ours) != len(theirs) or size < 2:
        return False
    return all(a == b or a.equals(b) for a, b in zip(ours, theirs, strict=True))


def _same_otherwise(gold, found, answer: str, wanted: str) -> bool:
    """Whether two answers that math-verify tells apart are the same complex number, point, or set of solutions."""
    from sympy import And
    from sympy.core.relational import Relational

    if _same_complex(gold, found) or _same_point(gold, found):
        return True
    chains = [side.args for side in (gold, found) if isinstance(side, And)]
    if len(chains) == 2 and all(isinstance(part, Relational) for chain in chains for part in chain):
        return {part.canonical for part in chains[0]} == {part.canonical for part in chains[1]}
    return _same_solutions(gold, found, answer, wanted)


def _ratio(text: str) -> list | None:
    """The terms of a ratio of three or more, each divided by the first; None for anything else."""
    terms = [parse_math(term) for term in text.split(":")]
    if len(terms) < 3 or not all(term and not isinstance(term[0], str) for term in terms) or terms[0][0] == 0:
        return None
    return [term[0] / terms[0][0] for term in terms]


def same_value(answer: str, wanted: str) -> bool:
    """Whether two texts have the same value, for a reason."""
    from math_verify import verify

    if too_large(answer) or too_large(wanted):
        return False
    gold, found = parse_math(wanted), parse_math(answer)
    if not gold or not found:
        return False
    plain = isinstance(gold[0], str) or isinstance(found[0], str)
    if not plain and not (_bounded(gold[0]) and _bounded(found[0])):
        return False
    try:
        if wanted.count(":") > 1 or answer.count(":") > 1:
            ours, theirs = _ratio(wanted), _ratio(answer)
            return ours is not None and theirs is not None and ours == theirs
        if not verify(gold, found, timeout_seconds=None, allow_set_relation_comp=True):
            return not plain and _same_otherwise(gold[0], found[0], answer, wanted)
        if ("=" in answer) != ("=" in wanted) and not (_named(answer) and _named(wanted)):
            return False
        if {_kind(answer), _kind(wanted)} == {"\\{", "("} or not _same_repetitions(answer, wanted):
            return False
        return plain or _sound(gold[0], found[0])
    except Exception:  # sympy raises a dozen kinds where it cannot tell; what nobody can confirm is not right
        return False

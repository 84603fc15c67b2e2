"""Compare two mathematical expressions with math-verify, and with rules for what it does not compare or gets wrong."""

from __future__ import annotations

import collections
import functools
import importlib
import logging
import math
import re

from graders.math.tex import THOUSANDS, parts_of, too_large, without_thousands

LARGEST = 10_000  # decimal digits of a number, and terms of a sum, that are still computed
OPENING = re.compile(r"(?:\\left)?\s*(\\\{|\()")  # of a set or a tuple
CLOSING = re.compile(r"(?:\\\}|\))\s*$")
# Signs by which the number of elements is not the number of parts: both signs, sets, unions, inequalities, brackets.
NOT_COUNTED = re.compile(r"\\pm|\\mp|\\\{|\\cup|[<>]|\\[lg]e|[([]")
UNNAMED = re.compile(r"^\s*-?[0-9.]+\s*[A-Za-z]|[A-Za-z]\s*\^\s*\{?[0-9]|[+]")  # "2x", "x^2", a sum


class _Sympy:
    """The library, imported at its first use: that takes half a second."""

    def __getattr__(self, name: str):
        return getattr(importlib.import_module("sympy"), name)


sympy = _Sympy()


@functools.lru_cache(maxsize=256)  # the samples of a group have one truth
def parse_math(latex: str) -> list:
    """Parse LaTeX with math-verify into sympy expressions, possibly none; its own time-outs are signals and stay off.

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


def _is_long(series) -> bool:
    """Return True if a sum or product has a bound that is a number beyond the largest number of terms."""
    for _, *bounds in series.limits:
        for bound in bounds:
            if not bound.is_number or not bound.is_finite:
                continue
            if _size(bound) > 4 or abs(float(bound)) > LARGEST:
                return True
    return False


def _has_tower(expression) -> bool:
    """Return True if an exponent holds a power whose exponent varies, as in 2^{2^x}."""
    for power in expression.atoms(sympy.Pow):
        for inner in power.exp.atoms(sympy.Pow):
            if inner.exp.free_symbols:
                return True
    return False


def _size(expression) -> float:
    """Return an upper bound of the decimal digits of the numbers that an expression evaluates to; symbols have none."""
    sizes = [_size(part) for part in expression.args]
    largest = max(sizes, default=0.0)
    if largest > LARGEST:
        return math.inf
    if expression.is_Rational:
        top = f"{abs(expression.p):x}"  # in base 16: Python does not write thousands of decimal digits
        bottom = f"{expression.q:x}"
        return max(len(top), len(bottom)) * 1.21
    if isinstance(expression, sympy.Pow) and expression.exp.is_number:
        if sizes[1] > 4:
            return math.inf  # beyond LARGEST, and perhaps beyond a float
        times = abs(float(expression.exp))
        return max(sizes[0], 1.0) * max(times, 1.0)
    if isinstance(expression, sympy.factorial | sympy.factorial2) and expression.args[0].is_number:
        if sizes[0] > 8:
            return math.inf
        number = abs(float(expression.args[0]))
        return number * math.log10(number + 2)  # the digits of n to the power of n
    if isinstance(expression, sympy.Sum | sympy.Product) and _is_long(expression):
        return math.inf
    if isinstance(expression, sympy.Integral) and _has_tower(expression):
        return math.inf
    if expression.is_Mul:
        return sum(sizes)
    return largest


def _bounded(expression) -> bool:
    """Test if the numbers of an expression are small enough to compute; parsers leave towers and factorials alone."""
    parts = [expression]
    if isinstance(expression, sympy.MatrixBase):
        parts = expression.flat()
    try:
        return all(_size(part) <= LARGEST for part in parts if isinstance(part, sympy.Basic))
    except (TypeError, ValueError, OverflowError):  # a number that is none, as in 1/0: sympy says so later
        return True


def _elements(expression) -> list:
    """Return the elements of a matrix, set, tuple, interval, or an equation such as x = 2; [] of anything else."""
    if isinstance(expression, sympy.MatrixBase):
        return list(expression.flat())
    if isinstance(expression, sympy.FiniteSet | sympy.Tuple):
        return list(expression.args)
    if isinstance(expression, sympy.Interval):
        return [expression.start, expression.end]
    if isinstance(expression, sympy.Eq) and expression.lhs.is_Symbol:
        return [expression.rhs]
    return []


def _numbers(expression) -> list:
    """Return the numbers that an answer consists of, sorted; [] if it does not consist of numbers."""
    elements = _elements(expression)
    if elements:
        return sorted(number for element in elements for number in _numbers(element))
    if not isinstance(expression, sympy.Expr) or not expression.is_number:
        return []
    value = sympy.N(expression.doit(), 20)
    return [value] if value.is_Float or value.is_Integer else []


def _close(gold, found) -> bool:
    """Test if the numbers of two answers agree to 0.5 %: math-verify rounds at a fixed place, so 1e-31 is its 0."""
    if gold.has(sympy.UnevaluatedExpr) or found.has(sympy.UnevaluatedExpr):
        return True  # a percentage, which may stand for the number before its sign
    for ours, theirs in zip(_numbers(gold), _numbers(found), strict=False):
        allowed = 0.005 * max(abs(ours), abs(theirs))
        if ours != theirs and abs(ours - theirs) > allowed:
            return False
    return True


def _names_point(equations, point) -> bool:
    """Test if equations give the coordinates of a point in the order of their letters: x = 2, y = 3 is (2, 3)."""
    named = sorted(equations.args, key=lambda equation: str(equation.lhs))
    values = _elements(point)
    if len(named) != len(values):
        return False
    return all(equation.rhs.equals(value) for equation, value in zip(named, values, strict=True))


def _same_equation(gold, found) -> bool:
    """Return True if one equation is a multiple of the other, or has solutions by which math-verify compared them."""
    sides = (*gold.args, *found.args)
    if not all(isinstance(side, sympy.Expr) for side in sides):
        return True
    ours = gold.lhs.doit() - gold.rhs.doit()
    theirs = found.lhs.doit() - found.rhs.doit()
    if theirs != 0:
        ratio = sympy.simplify(ours / theirs)
        if ratio.is_number and ratio.is_finite and ratio != 0:
            return True
    return bool(sympy.solve(gold, gold.free_symbols))


def _sound(gold, found) -> bool:
    """Test if an equality of math-verify says something: to it equations without solutions are equal, 1 = 2 is 2."""
    statement = sympy.Rel | sympy.logic.boolalg.BooleanFunction
    if isinstance(found, statement) and not found.free_symbols:
        steps = found.args
        if isinstance(found, sympy.Rel):
            steps = [found]
        for step in steps:
            if not isinstance(step, sympy.Eq) or not _close(step.lhs, step.rhs):
                return False
        return not isinstance(gold, statement)
    for several, point in ((gold, found), (found, gold)):
        if not isinstance(several, sympy.FiniteSet) or not isinstance(point, sympy.Tuple | sympy.Interval):
            continue
        if all(isinstance(equation, sympy.Eq) for equation in several.args):
            return _names_point(several, point)
    if isinstance(found, sympy.Set) and found.is_empty:
        return isinstance(gold, sympy.Set)
    if isinstance(gold, sympy.Eq) and isinstance(found, sympy.Eq):
        unsolved = gold.lhs not in found.args and found.rhs != 0  # "x + 1 = 5" leaves x = 4 to be computed
        if (gold.lhs.is_Symbol and gold.rhs.is_number and unsolved) or not _same_equation(gold, found):
            return False
    return _close(gold, found)


def _repetitions(parts: list[str]) -> collections.Counter:
    """Count how often the numbers of each part occur; what the parser does not read is left out."""
    counts = collections.Counter()
    for part in parts:
        parsed = parse_math(part)
        if parsed and not isinstance(parsed[0], str):
            numbers = [round(number, 8) for number in _numbers(parsed[0])]
            counts[str(numbers)] += 1
    return counts


def _same_repetitions(answer: str, wanted: str) -> bool:
    """Return True if two lists without brackets, equal as sets, have each element as often."""
    if NOT_COUNTED.search(answer) or NOT_COUNTED.search(wanted):
        return True
    said = parts_of(answer)
    right = parts_of(wanted)
    if len(said) != len(right):  # commas may stand between thousands
        ours = {len(right), len(parts_of(THOUSANDS.sub("", wanted)))}
        return not ours.isdisjoint({len(said), len(parts_of(THOUSANDS.sub("", answer)))})
    counts = _repetitions(said)
    each_once = len(counts) == len(said)
    return each_once or counts == _repetitions(right)


def _kind(text: str) -> str:
    """Return the opening bracket around an entire list: "\\\\{" of a set, "(" of a tuple; "" if there is none."""
    if "," not in text or len(parts_of(text)) != 1:
        return ""
    opening = OPENING.match(text)
    closing = CLOSING.search(text)
    return opening[1] if opening and closing else ""


def _named(text: str) -> bool:
    """Test if the left side of an equation names what the right side is: "x", "f(3)", "|AB|", not "x^2" or "2x"."""
    left, equals, _ = text.partition("=")
    if not equals or not re.search("[A-Za-z]", left):
        return True
    return UNNAMED.search(left) is None


def _solutions(expression, text: str) -> tuple | None:
    """Return (unknown, its allowed real numbers) of linear inequalities, or (None, set) of a set; None for all else."""
    if isinstance(expression, sympy.Eq) and expression.lhs.is_Symbol and isinstance(expression.rhs, sympy.Set):
        return expression.lhs, expression.rhs  # "x in [0, 1]"
    statements = [expression]
    if isinstance(expression, sympy.FiniteSet | sympy.Or):
        statements = expression.args
    groups = []
    for statement in statements:
        chained = isinstance(statement, sympy.And)
        groups.append(statement.args if chained else [statement])
    relations = [relation for group in groups for relation in group]
    symbols = set()
    for relation in relations:
        if not isinstance(relation, sympy.Rel) or relation.rel_op in ("==", "!="):
            return (None, expression) if isinstance(expression, sympy.Set) else None
        symbols |= relation.free_symbols
    linear = all(relation.lhs.is_Symbol != relation.rhs.is_Symbol for relation in relations)
    if len(symbols) != 1 or not linear:
        return None
    unknown = symbols.pop()
    sets = [sympy.Intersection(*(relation.as_set() for relation in group)) for group in groups]
    allowed = sympy.Intersection(*sets)
    # "or" unites; "and" and commas intersect, or unite where nothing would be left: "x < 1, x > 2".
    nothing_left = allowed.is_empty and not re.search(r"\band\b", text)
    if nothing_left or re.search(r"\bor\b", text):
        allowed = sympy.Union(*sets)
    return unknown, allowed


def _same_solutions(gold, found, answer: str, wanted: str) -> bool:
    """Test if two statements, or a statement and a set, allow the same numbers, and one does so by inequalities."""
    if not gold.atoms(sympy.Rel) and not found.atoms(sympy.Rel):
        return False
    if isinstance(gold, sympy.And) and isinstance(found, sympy.And):  # chains such as a < b < c
        comparisons = {part.canonical for part in gold.args}
        if comparisons == {part.canonical for part in found.args}:
            return True
    ours = _solutions(gold, wanted)
    theirs = _solutions(found, answer)
    if ours is None or theirs is None:
        return False
    our_unknown, our_numbers = ours
    their_unknown, their_numbers = theirs
    if our_unknown and their_unknown and our_unknown != their_unknown:
        return False
    return not our_numbers.is_empty and our_numbers == their_numbers


def _same_at_points(gold, found) -> bool:
    """Test if two formulas have equal values: numbers with i, and roots, powers and logarithms of positive letters."""
    if isinstance(gold, sympy.Eq) and gold.lhs.is_Atom:
        gold = gold.rhs
    if not isinstance(gold, sympy.Expr) or not isinstance(found, sympy.Expr) or gold.has(sympy.Abs):
        return False
    letters = gold.free_symbols | found.free_symbols
    names = sorted({letter.name for letter in letters})
    powers = gold.atoms(sympy.Pow) | found.atoms(sympy.Pow)
    rooted = any(not power.exp.is_Integer for power in powers)
    named = gold.has(sympy.I, sympy.log) or found.has(sympy.I, sympy.log)
    if not rooted and "i" not in names and not named:
        return False
    for begin in (1.37, 2.2, 3.03):
        numbers = {name: begin + 0.61 * place for place, name in enumerate(names)}
        numbers["i"] = sympy.I
        values = {letter: numbers[letter.name] for letter in letters}
        ours = sympy.N(gold.subs(values).doit(), 20)
        theirs = sympy.N(found.subs(values).doit(), 20)
        if not ours.is_number or abs(ours - theirs) > 1e-9 * (abs(ours) or 1):
            return False
    return True


def _coordinates(expression) -> list:
    """Return the coordinates of a tuple, column or row, or of a pair read as an open interval; [] for anything else."""
    if isinstance(expression, sympy.MatrixBase) and 1 in expression.shape:
        return list(expression.flat())
    if isinstance(expression, sympy.Tuple):
        return list(expression.args)
    if isinstance(expression, sympy.Interval) and expression.left_open == expression.right_open:
        return [expression.start, expression.end]  # "[1, 2]" is a row
    return []


def _along_axes(expression, size: int) -> list:
    """Return the first ``size`` coordinates of a sum of the vectors i, j and k; [] for anything else."""
    named = {symbol.name: symbol for symbol in expression.free_symbols}
    if not isinstance(expression, sympy.Expr) or not named or not set(named) <= set("ijk"):
        return []
    whole = expression.doit().expand()
    rest = whole
    numbers = []
    for name in "ijk"[:size]:
        vector = named.get(name, sympy.Symbol(name))
        number = whole.coeff(vector)
        numbers.append(number)
        rest -= number * vector
    return numbers if rest.expand() == 0 else []


def _same_point(gold, found) -> bool:
    """Test if a point and a vector, in whatever notation, have the same coordinates; two matrices are not compared."""
    kinds = [isinstance(side, sympy.MatrixBase) for side in (gold, found)]
    closed = [isinstance(side, sympy.Interval) and not side.left_open for side in (gold, found)]
    if all(kinds) or (any(closed) and not any(kinds)):
        return False
    ours = _coordinates(gold)
    theirs = _coordinates(found)
    size = max(len(ours), len(theirs))
    if size < 2:
        return False
    ours = ours or _along_axes(gold, size)
    theirs = theirs or _along_axes(found, size)
    if len(ours) != len(theirs):
        return False
    return all(a == b or a.equals(b) for a, b in zip(ours, theirs, strict=True))


def _same_form(answer: str, wanted: str) -> bool:
    """Return False for x^2 = 4 and 4, x = 1 = 2, 1 = 1, a set and a tuple, and lists of unequal repetitions."""
    *names, value = [side.strip() for side in answer.split("=")]
    if len(parts_of(answer)) == 1 and not re.search("[<>]|\\\\(?:le|ge|ne|text|begin)", answer):
        if value in names:
            return False
        values = []
        for side in (*names, value):
            if not re.search("[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", side)):
                values.append(side)
        if not all(same_value(other, values[-1]) for other in values[:-1][:4]):
            return False
    if ("=" in answer) != ("=" in wanted) and not (_named(answer) and _named(wanted)):
        return False
    if {_kind(answer), _kind(wanted)} == {"\\{", "("}:
        return False
    return _same_repetitions(answer, wanted)


def _equal(gold: list, found: list, answer: str, wanted: str) -> bool:
    """Return True if two texts that are parsed are equal. Raises what sympy raises where it cannot tell."""
    from math_verify import verify

    if wanted.count(":") > 1 or answer.count(":") > 1:
        return False  # a ratio of three, whose text differs
    unread = isinstance(gold[0], str) or isinstance(found[0], str)
    if not verify(gold, found, timeout_seconds=None):
        if unread or _same_at_points(gold[0], found[0]) or _same_point(gold[0], found[0]):
            return not unread
        return _same_solutions(gold[0], found[0], answer, wanted)
    if not _same_form(answer, wanted):
        return False
    return unread or _sound(gold[0], found[0])


def same_value(answer: str, wanted: str) -> bool:
    """Return True if two texts have the same value, for a reason."""
    joined = without_thousands(answer), without_thousands(wanted)
    if joined != (answer, wanted) and (joined[0] == joined[1] or same_value(*joined)):
        return True
    if too_large(answer) or too_large(wanted):
        return False
    gold = parse_math(wanted)
    found = parse_math(answer)
    if not gold or not found:
        return False
    if not _bounded(gold[0]) or not _bounded(found[0]):
        return False
    try:
        return _equal(gold, found, answer, wanted)
    except Exception:  # sympy raises a dozen kinds where it cannot tell; what nobody can confirm is not right
        return False

"""Units, money and percent signs in final answers: split them from their numbers and compare them."""

from __future__ import annotations

import functools
import re
from collections import Counter
from decimal import Decimal
from fractions import Fraction

from graders.math.tex import GROUP, TEXT

GAP = r"(?:\s|\\[,;:! ]|~)*"

SAME_UNIT = (  # what is not here is never taken for a different unit; nor are pounds, of weight or of money
    "mm millimeter millimeters millimetre millimetres, cm centimeter centimeters centimetre centimetres, "
    "m meter meters metre metres, km kilometer kilometers kilometre kilometres, in inch inches, ft foot feet, "
    "yd yard yards, mi mile miles, milligram milligrams, g gram grams gm, kg kilogram kilograms, "
    "lb lbs pound pounds gbp, oz ounce ounces, ml milliliter milliliters millilitre, l liter liters litre litres, "
    "gal gallon gallons, s sec secs second seconds, min mins minute minutes, h hr hrs hour hours, day days, "
    "week weeks, month months, yr year years, dollar dollars usd, cent cents, euro euros eur, rupee rupees rs inr, "
    "yen yuan jpy cny, deg degree degrees, rad radian radians, am a.m, pm p.m, n newton newtons, j joule joules, "
    "w watt watts, v volt volts, a amp amps ampere amperes, hz hertz, pa pascal pascals, ohm ohms, "
    "ev electronvolt electronvolts, kelvin kelvins K, mol mole moles, farad farads, acre acres "
)
UNITS = {name: line.split()[0] for line in SAME_UNIT.split(",") for name in line.split()}


def _table(text: str) -> dict[str, str]:
    """Read a table that is written as "key value, key value"; the value may be several words."""
    return dict(line.split(maxsplit=1) for line in text.split(","))


PREFIXES = _table("giga G, mega M, kilo k, milli m, micro \u00b5, nano n, pico p")
SI = _table("G 1e9, M 1e6, k 1e3, m 1e-3, \u00b5 1e-6, n 1e-9, p 1e-12")
SYMBOLS = _table("m m, g g, s s, L l, W w, V v, A a, J j, N n, Hz hz, Pa pa, ohm ohm, eV ev, mol mol, F farad")


def _scaled() -> dict[str, str]:
    """Return the symbols and names with prefixes that no line above has: "kJ", "kilojoule", "MHz"."""
    found = {}
    for name, letter in PREFIXES.items():
        for symbol, base in SYMBOLS.items():
            unit = letter + UNITS.get(base, base)
            found[letter + symbol] = unit
            for long, same in UNITS.items():
                if same == base:
                    found[name + long] = unit
    return {spelled: unit for spelled, unit in found.items() if spelled not in UNITS}


SCALED = _scaled()
SCALED |= {"milligram": "mg", "milligrams": "mg", "um": "\u00b5m"}
UNITS = {name: SCALED.get(name, base) for name, base in UNITS.items()}
SIZES = {  # unit -> (the unit that it is a multiple of, how many of it)
    letter + base: (base, Fraction(size)) for base in SYMBOLS.values() for letter, size in SI.items()
}
MULTIPLES = _table(
    "cm m 1/100, in ft 1/12, yd ft 3, mi ft 5280, min s 60, h s 3600, day s 86400, week s 604800, yr month 12, "
    "dollar cent 100, pa pa 1"  # pascals, not pico-amperes
)
for name, multiple in MULTIPLES.items():
    base, size = multiple.split()
    SIZES[name] = (base, Fraction(size))
POWERS = _table("square 2, sq 2, squared 2, cubic 3, cu 3, cubed 3")
COMPOUND = _table("mph mi / h, kmh km / h, kph km / h, kmph km / h, sqft ft ^2, fps ft / s")
SCALES = _table(  # powers of ten
    "ten 1, hundred 2, thousand 3, million 6, billion 9, trillion 12, k 3, M 6, mn 6, bn 9, mille -3, basis -4, "
    "ppm -6, ppb -9"
)
# Words that may stand among those that name a unit.
BETWEEN = {"of", "to", "on", "at", "by", "for", "the", "with", "any", "all"}
NO_UNIT = re.compile(
    "(?:sin|cos|tan|cot|csc|sinh|cosh|tanh|log|exp|mod|gcd|lcm|max|arg|det|dim|ker|sup|inf|lim|and|not|none|infinity|"
    "percent|percentage|pct|false|wrong|incorrect|impossible)",
    re.IGNORECASE,
)
NO_TAIL = re.compile(
    r"\b(?:not|wrong|incorrect|false|and|or|more|less|dozen|pairs|max|lg|det|exp|halves|maybe|perhaps|possibly|probably"
    r"|factorial|below|BCE?)\b|^\W*(?:text\W*)?(?:squared|cubed)",
    re.IGNORECASE,
)
EXPONENT = r"(?:\s*+\^\s*+(?:\{\s*+-?[0-9]\s*+\}|-?[0-9]))?+"  # possessive: blanks may be read in one way alone
UNIT_TAIL = re.compile(  # \text{ cm}^2, \mathrm{m}/\mathrm{s}, \Omega, ^\circ C, the base of a number, 5'
    rf"(?<![\s~])(?:(?:\s|\\[,;:! ]|~|/|\\cdot)*(?:{TEXT}{GROUP}|\\Omega(?![A-Za-z])){EXPONENT})+\s*$"
    rf"|(?<![\s~]){GAP}\\mu\s*(?:{TEXT}\{{\s*)?[A-Za-z]{{1,3}}\s*\}}?\s*$"
    rf"|\^\s*\{{?\s*{TEXT}\{{(?:st|nd|rd|th)\}}\s*\}}?\s*$"
    rf"|(?<![\s~]){GAP}\\[dt]?frac\s*\{{\s*{TEXT}\{{[^{{}}]*\}}{EXPONENT}\s*\}}\s*"
    rf"\{{\s*{TEXT}\{{[^{{}}]*\}}{EXPONENT}\s*\}}\s*$"
    r"|\^\s*\{?\s*\\circ\s*\}?\s*(?:\\(?:text|mathrm)\s*\{\s*)?[CF]?(?:\s*\})?\s*$|(?<=[0-9])_\{?[0-9]+\}?\s*$"
    r"|(?<=[0-9])'{1,2}\s*$"
)
WORD_TAIL = re.compile(rf"(?<=[0-9}})])(?:\\?\s|\\,|~)*((?:[A-Za-z]++\.?(?:{EXPONENT}|\s*/)\s*)+)$")
LETTERS = r"[\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af]"  # of Chinese, Japanese and Korean; without those of numerals
VALUED = r"\u4e07\u842c\u5343\u767e\u5341\u4ebf\u5104\u5146\u534a\u500d\u4ee5\u672a\u8d85\u4e0d\u6216\u662f\u9519\u8bef"
VALUED += r"\u8aa4\ub9cc\uc5b5\ucc9c\ubc31\uc0c1"  # letters that change the value, or state something
FOREIGN_TAIL = re.compile(  # a unit or an ending in letters that are not ASCII
    rf"(?<=[0-9}}])\s*(?:\(?(?:(?![{VALUED}]){LETTERS}){{1,12}}\)?"
    r"|\s(?!(?:mil|\u0442\u044b\u0441|\u043c\u0438\u043b)\w*)(?=[a-z]*[^\W\d_a-zA-Z])[^\W\d_]{3,}(?:\s[^\W\d_]+){0,2})$"
)
MONEY = _table(
    "$ dollar, \u00a3 lb, pounds lb, \u20ac euro, euro euro, \u20b9 rupee, Rs rupee, INR rupee, \u00a5 yen, "
    "USD dollar, EUR euro, GBP lb"
)
SIGN = "|".join(map(re.escape, MONEY))
MONEY_TAIL = re.compile(rf"(?<=[0-9])(?:\s|\\[,;:! ]|~)*\\?({SIGN})\s*$")
MONEY_HEAD = re.compile(
    rf"(-?)\s*+(?:{TEXT}\{{\s*+)?(?:US\s*+)?\\?({SIGN})(?![A-Za-z])\.?\s*+\}}?{GAP}(?=[-0-9.]|\\[dt]?frac)"
)


def is_word(piece: str) -> bool:
    """Return True if bare letters are a word and not a product: "east" and "cats", not "ab" or "xyz"."""
    for part in piece.split():
        if len(part) >= 5:
            return True
        if len(part) >= 3 and re.search("[eiou]|.a.+s$", part):
            return True
    return False


def unit_of(text: str) -> tuple:
    """Return a unit in one spelling, () where it is not known: "square feet" and "ft^2" are (("ft", 2),)."""
    text = re.sub(rf"\\[dt]?frac\s*({GROUP})\s*({GROUP})", r" \1 / \2 ", text)
    text = re.sub(r"([kMG]?)\s*\}?\s*\\Omega(?![A-Za-z])", r" \1ohm ", re.sub(TEXT, " ", text))
    text = re.sub(r"\\mu(?![A-Za-z])[\s{]*|\u03bc", "\u00b5", text)
    text = re.sub(r"\\(?!circ)(?:[A-Za-z]+|[^A-Za-z])", " ", text)
    parts: list[list] = []
    side = power = 1
    words = re.findall(r"[aApP]\.[mM]|[A-Za-z\u00b5]+|\^\s*\{?\s*-?[0-9]|/|\\circ|_\{?[0-9]+|''?", text)
    for word in words:
        if word[0] == "^" or word.lower() in ("squared", "cubed"):
            if not parts:
                return ()
            parts[-1][1] *= int(POWERS.get(word.lower(), re.sub(r"[\s{^]", "", word)))
        elif word == "/" or word.lower() == "per":
            side = -1
        elif word.lower() in POWERS:
            power = int(POWERS[word.lower()])
        elif parts and parts[-1][0] == "deg" and word[0] in "CFcf":
            parts[-1][0] = word[0].upper()
        elif word.lower() in COMPOUND:
            return unit_of(COMPOUND[word.lower()])
        else:
            known = "deg" if word == "\\circ" else UNITS.get(word) or SCALED.get(word) or UNITS.get(word.lower())
            known = known or SCALED.get(word.lower() if len(word) > 5 else "")
            if known is None and word[0] not in "_'":
                return ()
            parts.append([known or word.replace("{", ""), side * power])
            power = 1
    return tuple(sorted(map(tuple, parts)))


def _word_tail(text: str) -> re.Match | None:
    """Match bare words after a number that name what is counted; None if they are letters that are multiplied."""
    words = WORD_TAIL.search(text)
    if words is None:
        return None
    names = re.findall("[A-Za-z]+", words[1])
    before = text[: words.start()]
    glued = words.start() == words.start(1)
    counted = re.fullmatch(r"[-0-9.,]+", before) is not None
    known = [n in UNITS or n.lower() in {*UNITS, *POWERS, *COMPOUND, "per", "unit", "units"} for n in names]
    scaled = [counted and not glued and name in SCALED for name in names]
    named = [not glued and not NO_UNIT.fullmatch(n) and (is_word(n) or n.lower() in BETWEEN) for n in names]
    bare = re.sub(r"\\[A-Za-z]+", "", before)
    long = "/" in words[1] or any(len(name) > 1 for name in names)
    if re.fullmatch("st|nd|rd|th", words[1].strip()):
        return words
    named = [a or b or c for a, b, c in zip(known, scaled, named, strict=True)]
    return words if long and not re.search("[A-Za-z]", bare) and all(named) else None


@functools.lru_cache(maxsize=1024)
def split_unit(text: str) -> tuple[str, tuple]:
    """Return (value, unit) of an answer such as ``5\\text{ cm}``, "12 apples", ``\\$3``; bare letters are variables."""
    whole = re.fullmatch(TEXT + r"\{([^{}]*[0-9][^{}]*)\}", text)
    text = whole[1].strip() if whole else text
    money: tuple = ()
    if (sign := MONEY_HEAD.match(text)) is not None:
        text, money = sign[1] + text[sign.end() :], ((MONEY[sign[2]], 1),)
    elif (sign := MONEY_TAIL.search(text)) is not None:
        text, money = text[: sign.start()], ((MONEY[sign[1]], 1),)
    tail = UNIT_TAIL.search(text) or _word_tail(text) or FOREIGN_TAIL.search(text)
    if tail is None:
        return text, money
    value, said = text[: tail.start()].strip(), text[tail.start() :]
    names = re.findall("[A-Za-z]+", re.sub(TEXT, "", said))
    if not value or re.search(r"(?:=|<|>|[+*/^_(,-]|\\(?:cdot|times|le|ge|in|or|and|approx))$", value):
        return text, money
    if NO_TAIL.search(said):
        return text, money
    if re.search(r"\\(?:mu|Omega)", said) and not value[-1].isdigit():
        return text, money
    pieces = -1 if names and re.search("ths?$", names[-1]) else 1  # tenths, ten-thousandths
    names = [re.sub("ths?$", "", name) if pieces < 0 else name for name in names]
    if scale := [int(SCALES[name]) for name in names if name in SCALES]:
        value = f"{value} \\times 10^{{{pieces * sum(scale)}}}"
    return value, unit_of(said) or money


def scale_between(unit: tuple, other: tuple) -> Fraction | None:
    """Return how many of the other unit one unit is: 1/1000 for m and km; None if they measure different things."""
    found = []
    for parts in (unit, other):
        measured, size = Counter(), Fraction(1)
        for name, power in parts:
            base, factor = SIZES.get(name, (name, Fraction(1)))
            measured[base] += power
            size *= factor**power
        found.append(({base: power for base, power in measured.items() if power}, size))
    (ours, size), (theirs, their_size) = found
    return size / their_size if ours == theirs else None


PERCENT = re.compile(r"(?<!\s)\s*(?:\\?%|\\text\{\s*(?:percent|pct|\\?%)\s*\}|(?<![A-Za-z])percent)\s*$")
THOUSANDS = r"[0-9]{1,3}(?:(?:,|\{,\}|,\\!\s*|\\[,;: ]|\{\\,\}|~| )[0-9]{3})+"
DECIMAL = re.compile(
    rf"(-?)\s*({THOUSANDS}|[0-9]*)(\.[0-9]+)?(?:\s*(?:\\times|\\cdot)\s*\{{?10\}}?\s*\^\s*\{{?\s*([+-]?[0-9]{{1,4}})\s*\}}?)?"
)


def decimal_of(text: str) -> Decimal | None:
    """Return the exact value of a decimal number, perhaps times a power of ten; None for anything else."""
    found = DECIMAL.fullmatch(text)
    digits = re.sub("[^0-9]", "", found[2]) + (found[3] or "") if found else ""
    if not digits:
        return None
    return Decimal(f"{found[1]}{digits}e{found[4] or 0}")  # scaleb would round to the context's 28 digits


def same_percentage(answer: str, wanted: str) -> bool:
    """Return True if two answers differ in a percent sign alone, which may be left away of a number from 1 on."""
    plain, right = PERCENT.sub("", answer), PERCENT.sub("", wanted)
    if (plain == answer) == (right == wanted):
        return False
    value = decimal_of(plain)
    return value is not None and abs(value) >= 1 and value == decimal_of(right)

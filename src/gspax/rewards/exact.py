r"""Exact values of closed forms of whole numbers: `\frac{2^{60}+1}{3 \cdot 59!}`, in LaTeX or as programs write them.

A parser of mathematics compares numbers by their first decimals, so that all small numbers seem equal. Here every value
is a fraction, and nothing is computed unless its size is bounded in advance.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

_LONGEST = 800  # characters
_MOST_BITS = 1 << 15  # bits of a numerator or a denominator
_DEEPEST = 40  # nested groups
# Numbers as countries write them: 1.234,56 and 1.234.567; 1,234 and 12,34,567 and 1'234 with a point or without.
_CONTINENTAL = r"\d{1,3}(?:\.\d{3})+,\d+|\d{1,3}(?:\.\d{3}){2,}"
_GROUPED = r"(?:\d{1,3}(?:,\d{3})+|\d{1,2}(?:,\d{2})+,\d{3}|\d{1,3}(?:[_'’]\d{3})+)(?:\.\d*)?"
_NUMBER = rf"(?:(?:{_CONTINENTAL}|{_GROUPED})(?![\d,])|\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d{{1,3}}(?![a-zA-Z_]))?"
_REPEATING = (  # 0.1\overline{6} and 0.1(6)
    r"(?P<whole>\d*)\.(?P<once>\d*)"
    r"(?: ?\\(?:overline|bar|dot) ?\{? ?(?P<bar>\d+) ?\}?| ?\( ?(?P<bracket>\d+) ?\))"
)
_MIXED = (  # 3\frac{1}{2} and 3\frac12
    r"(?P<units>\d{1,3}(?:,\d{3})+|\d+) ?\\?[dt]?frac ?"
    r"(?:\{ ?(?P<above>\d+) ?\} ?\{ ?(?P<below>\d+) ?\}|(?P<digit>\d) ?(?P<other>\d))"
)
_TOKEN = re.compile(
    rf"\s*(?:(?P<repeating>{_REPEATING})|(?P<mixed>{_MIXED})|(?P<number>{_NUMBER})|\\?(?P<function>[dt]?frac|sqrt)"
    r"|\\(?P<command>cdot|times|div|ast|left|right)(?![a-zA-Z])|(?P<sign>[-+*/^!(){}÷×·⋅]))"
)
_SAME = {"cdot": "*", "times": "*", "ast": "*", "div": "/", "×": "*", "·": "*", "⋅": "*", "÷": "/"}
_SAME |= {"dfrac": "frac", "tfrac": "frac"}


class _UnknownError(Exception):
    """Raised if the text is not a closed form, or its value is too large or not rational."""


def evaluate(text: str) -> Fraction | None:
    r"""Evaluate an expression of numbers with + - * / ^ ! \frac \sqrt and brackets; None for others and large ones.

    >>> evaluate(r"\frac{2^{10}}{3!}"), evaluate(r"\sqrt{16}"), evaluate(r"\sqrt{2}"), evaluate("7^{10^9}")
    (Fraction(512, 3), Fraction(4, 1), None, None)
    >>> evaluate("1.234.567"), evaluate("1.234,5"), evaluate("12,34,567"), evaluate("1_234"), evaluate("1.234")
    (Fraction(1234567, 1), Fraction(2469, 2), Fraction(1234567, 1), Fraction(1234, 1), Fraction(617, 500))
    >>> evaluate(r"3\frac{1}{2}"), evaluate(r"0.1\overline{6}"), evaluate("0.(3)"), evaluate("1.5e3")
    (Fraction(7, 2), Fraction(1, 6), Fraction(1, 3), Fraction(1500, 1))
    """
    if len(text) > _LONGEST or (tokens := _scan(text.rstrip())) is None:
        return None
    try:
        parser = _Parser(tokens)
        value = parser.sum()
        return value if parser.at_end() else None
    except (_UnknownError, ZeroDivisionError):
        return None


def _scan(text: str) -> list[str] | None:
    """Split a text into tokens, mixed numbers and repeating decimals as sums in brackets; None for unknown texts."""
    tokens: list[str] = []
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            return None
        position, kind, token = match.end(), match.lastgroup, match[match.lastgroup or 0]
        if "," in token and "(" in text:  # a pair, or a number
            return None
        token = _SAME.get(token, token)
        if kind == "repeating":
            once, again = match["once"], match["bar"] or match["bracket"]
            tokens += ["(", f"{match['whole']}.{once}0", "+", again, "/", "9" * len(again) + "0" * len(once), ")"]
        elif kind == "mixed":
            above, below = match["above"] or match["digit"], match["below"] or match["other"]
            tokens += ["(", _digits(match["units"]), "+", above, "/", below, ")"]
        elif kind == "number":
            tokens.append(_digits(token))
        elif token == "*" and tokens[-1:] == ["*"]:  # `**`, as programs write powers
            tokens[-1] = "^"
        elif token not in ("left", "right"):
            tokens.append(token)
    return tokens


def _digits(number: str) -> str:
    """Drop the separators of thousands."""
    if number.count(".") > 1 or "." in number.rpartition(",")[0]:
        number = number.replace(".", "").replace(",", ".")
    return re.sub(r"[,_'’]", "", number)


class _Parser:
    def __init__(self, tokens: list[str]) -> None:
        self._tokens, self._position, self._depth = tokens, 0, 0

    def at_end(self) -> bool:
        return self._position == len(self._tokens)

    def _next(self) -> str:
        return "" if self.at_end() else self._tokens[self._position]

    def _take(self, *tokens: str) -> str:
        """Take the next token if it is one of these; else return an empty text."""
        token = self._next()
        if token not in tokens:
            return ""
        self._position += 1
        return token

    def sum(self) -> Fraction:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise _UnknownError
        value = self._product()
        while sign := self._take("+", "-"):
            value = _bounded(value + self._product() if sign == "+" else value - self._product())
        self._depth -= 1
        return value

    def _product(self) -> Fraction:
        value = self._signed()
        while True:
            if sign := self._take("*", "/"):
                factor = self._signed()
                value = _bounded(value * factor if sign == "*" else value / factor)
            elif self._next() in ("(", "frac", "sqrt"):
                if self._next() == "frac" and self._tokens[self._position - 1][-1:].isdigit():
                    raise _UnknownError  # a mixed number is not a product
                value = _bounded(value * self._power())
            else:
                return value

    def _signed(self) -> Fraction:
        negative = False
        while sign := self._take("+", "-"):
            negative ^= sign == "-"
        value = self._power()
        return -value if negative else value

    def _power(self) -> Fraction:
        base = self._factor()
        while self._take("!"):
            base = _factorial(base)
        if not self._take("^"):
            return base
        return _raise(base, self._signed())

    def _factor(self) -> Fraction:
        if self._take("frac"):
            above, below = self._argument(), self._argument()
            return _bounded(above / below)
        if self._take("sqrt"):
            return _root(self._argument())
        for left, right in ("()", "{}"):
            if self._take(left):
                value = self.sum()
                if not self._take(right):
                    raise _UnknownError
                return value
        token = self._next()
        if not token[:1].isdigit() and token[:1] != ".":
            raise _UnknownError
        self._position += 1
        return Fraction(token)

    def _argument(self) -> Fraction:
        """Parse the expression in braces, or one digit."""
        token = self._next()
        if token[:1].isdigit():
            self._tokens[self._position : self._position + 1] = [token[:1], *([token[1:]] if token[1:] else [])]
        return self._factor()


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _MOST_BITS:
        raise _UnknownError
    return value


def _raise(base: Fraction, exponent: Fraction) -> Fraction:
    size = max(base.numerator.bit_length(), base.denominator.bit_length())
    if exponent.denominator != 1 or abs(exponent) * size > _MOST_BITS:
        raise _UnknownError
    return base ** int(exponent)


def _factorial(value: Fraction) -> Fraction:
    if value.denominator != 1 or not 0 <= value <= 3000:  # 3000! has 30,000 bits
        raise _UnknownError
    return Fraction(math.factorial(int(value)))


def _root(value: Fraction) -> Fraction:
    if value < 0:
        raise _UnknownError
    root = Fraction(math.isqrt(value.numerator), math.isqrt(value.denominator))
    if root * root != value:
        raise _UnknownError
    return root

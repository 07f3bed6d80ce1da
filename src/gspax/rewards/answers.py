r"""Final answers: finds them in completions, and decides which are equal without computer algebra.

`extract` finds an answer (`gspax.rewards.finding`), `gspax.rewards.values` reads it, and `compare` decides by the kinds
of the values. What it does not decide needs a parser of mathematics (`gspax.rewards.math`).
"""

from __future__ import annotations

from fractions import Fraction

from gspax.rewards.finding import FORMS, extract, find_problem, reference
from gspax.rewards.notation import bare, write_numbers
from gspax.rewards.values import (
    Answer,
    Based,
    Bound,
    Choice,
    Quantity,
    Several,
    Time,
    Verbatim,
    Words,
    read,
)

__all__ = ["FORMS", "canonical", "compare", "extract", "find_problem", "reference", "write_numbers"]


def compare(expected: str, answer: str) -> bool | None:
    """Return whether two answers are equal if strings and rational numbers decide it, else None.

    Differences below one part in 10⁵ between a decimal and another number are not decided: one may be rounded. Digits
    with a space between them are a mixed number (`3 1/2`) or groups of three (`1 234`). Others, such as `1 2`, equal
    only themselves; math-verify would add the numbers.
    """
    if expected == answer:
        return bare(answer) != ""
    wanted, got = read(expected), read(answer)
    if not wanted.text or not got.text:
        return False
    if wanted.text == got.text:
        return True
    if wanted.power and got.power and wanted.power != got.power:  # square inches are not cubic inches
        return False
    if isinstance(wanted.value, Quantity) and isinstance(got.value, Quantity):
        return _compare_numbers(wanted.value, got.value)
    equal = _compare_kinds(wanted, got)
    return False if equal is None and wanted.is_changed != got.is_changed else equal


def _compare_numbers(wanted: Quantity, got: Quantity) -> bool | None:
    if wanted.number == got.number:
        return None if wanted.has_unit else True
    difference, limit = abs(wanted.number - got.number), Fraction(1, 10**5) * max(Fraction(1), abs(wanted.number))
    if (wanted.is_decimal or got.is_decimal) and difference <= limit:
        return None
    counts_dozens = got.dozens and not (wanted.dozens or wanted.has_unit)  # "How many dozens of eggs ...?"
    return counts_dozens and wanted.number == got.number / 12


def _compare_kinds(expected: Answer, answer: Answer) -> bool | None:
    """Compare other values by their kinds; None if these do not decide. The first case that fits decides."""
    wanted, got = expected.value, answer.value
    match wanted, got:
        case (Quantity(), Several() | Bound()) | (Several() | Bound(), Quantity()):
            return False
        case Several(), Several():
            return None if wanted.numbers == got.numbers else False
        case Choice(), Choice():
            return wanted.letter == got.letter if wanted.alone or got.alone or wanted.letter != got.letter else None
        case Words(), Words():
            return wanted.parts == got.parts if not (wanted.may_be_product and got.may_be_product) else None
        case (Choice(alone=True), Words(may_be_product=False)) | (Words(may_be_product=False), Choice(alone=True)):
            return False
        case Time(), Time():
            return wanted.clock == got.clock and wanted.half in ("", got.half)
        case Based(), Based():
            return wanted == got
        case Based(), _ if answer.text.isalnum():  # without the base
            return answer.text == wanted.digits
        case Quantity(), Based():
            return wanted.number == got.number
        case (Verbatim(), _) | (_, Verbatim()):
            return wanted == got
    return None


def canonical(answer: str) -> str:
    r"""Return a text that equal numbers share, for counting answers: `0.5`, `\frac{1}{2}` and `1/2` give `1/2`.

    Other answers are compared as texts, so equal formulas may differ.

    >>> canonical("1,600.0"), canonical(r"$\frac{1}{2}$"), canonical("x + 1.")
    ('1600', '1/2', 'x + 1')
    """
    known = read(answer)
    match known.value:
        case Choice(letter):
            return letter
        case Quantity(number) if max(number.numerator, number.denominator).bit_length() <= 4000:
            return str(number)
    return known.text

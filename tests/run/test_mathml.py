"""TeX becomes MathML or stays as it is; texts are never lost, and no text takes long."""

import json
import re
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspax.run import mathml
from gspax.run.pages import render_prose

MATH500 = Path(__file__).parents[3] / "shared" / "data" / "math500" / "test.jsonl"


def table(*rows):
    cells = ("".join(f"<mtd>{cell}</mtd>" for cell in row) for row in rows)
    return f"<mtable>{''.join(f'<mtr>{row}</mtr>' for row in cells)}</mtable>"


NUMBERS = table(["<mn>1</mn>", "<mn>2</mn>"], ["<mn>3</mn>"])


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("12", "<mn>12</mn>"),
        ("1,600.5x", "<mrow><mn>1,600.5</mn><mi>x</mi></mrow>"),
        ("a < b - c", "<mrow><mi>a</mi><mo>&lt;</mo><mi>b</mi><mo>−</mo><mi>c</mi></mrow>"),
        (r"\frac{1}{x}", "<mfrac><mn>1</mn><mi>x</mi></mfrac>"),
        (r"\dfrac12", "<mfrac><mn>1</mn><mn>2</mn></mfrac>"),
        ("x^12", "<mrow><msup><mi>x</mi><mn>1</mn></msup><mn>2</mn></mrow>"),
        ("x^{12}_n", "<msubsup><mi>x</mi><mi>n</mi><mn>12</mn></msubsup>"),
        ("a_{i}", "<msub><mi>a</mi><mi>i</mi></msub>"),
        ("f''", "<msup><mi>f</mi><mo>′′</mo></msup>"),
        (r"90^\circ", "<msup><mn>90</mn><mo>∘</mo></msup>"),
        (r"\sqrt 2", "<msqrt><mn>2</mn></msqrt>"),
        (r"\sqrt[3]{\pi}", "<mroot><mi>π</mi><mn>3</mn></mroot>"),
        (r"\boxed{5\%}", "<mrow class=boxed><mrow><mn>5</mn><mo>%</mo></mrow></mrow>"),
        (r"2\,\text{ cm }", '<mrow><mn>2</mn><mspace width=".17em"></mspace><mtext> cm </mtext></mrow>'),
        (r"\sum_{i}^n", "<munderover><mo>∑</mo><mi>i</mi><mi>n</mi></munderover>"),
        (r"\sin\Theta", "<mrow><mi>sin</mi><mi>Θ</mi></mrow>"),
        (r"\left(3,\infty\right]", "<mrow><mo>(</mo><mn>3</mn><mo>,</mo><mi>∞</mi><mo>]</mo></mrow>"),
        (r"\left.x\right|", "<mrow><mi>x</mi><mo>|</mo></mrow>"),
        (r"\binom{n}2", f"<mrow><mo>(</mo>{table(['<mi>n</mi>'], ['<mn>2</mn>'])}<mo>)</mo></mrow>"),
        (r"\begin{bmatrix}1&2\\3\end{bmatrix}", f"<mrow><mo>[</mo>{NUMBERS}<mo>]</mo></mrow>"),
        (r"\overline{AB}", "<mover><mrow><mi>A</mi><mi>B</mi></mrow><mo>‾</mo></mover>"),
    ],
)  # fmt: skip
def test_a_formula_becomes_mathml(source, wanted):
    assert mathml.render(mathml.convert(source)) == wanted


@pytest.mark.parametrize(
    "source",
    ["", " ", r"\unknown", r"\frac{1}", "{", "}", "x^", "a^b^c", r"\left(x", r"\right)", "50%", r"\sqrt[3", "a & b",
     "\x1b", r"\begin{tikzpicture}\end{tikzpicture}", r"\begin{matrix}1", r"\begin{matrix}1\end{cases}",
     "{" * 60 + "x" + "}" * 60, r"\frac" * 190 + "1", r"\left(" * 150],
)  # fmt: skip
def test_what_is_not_converted_stays_source(source):
    assert mathml.convert(source) is None
    assert mathml.split(f"a ${source}$ b") == [f"a ${source}$ b"]


@pytest.mark.parametrize(
    ("text", "formulas"),
    [
        ("no formula", []),
        (r"$x$ and \(y\) and \[z\] and $$w$$", ["$x$", r"\(y\)", r"\[z\]", "$$w$$"]),
        ("It costs $5 and $7, or $ 8 $.", []),
        (r"from \$5 to \$6", []),
        ("$5/$7 and $x$", ["$x$"]),
        ("$a\nb$", []),
        (r"so \boxed{\frac{1}{2}}.", [r"\boxed{\frac{1}{2}}"]),
        (r"so \boxed{1", []),
    ],
)
def test_formulas_are_found_between_delimiters(text, formulas):
    assert [part.source for part in mathml.split(text) if not isinstance(part, str)] == formulas


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.sampled_from([*'${}[]()^_&\\ a1<"', "\\frac", "\\left", "\\right", "\\boxed", "\\begin{matrix}"]),
        max_size=40,
    )
)
def test_no_text_is_lost_and_no_markup_is_forged(words):
    text = "".join(words)
    parts = mathml.split(text)
    assert "".join(part if isinstance(part, str) else part.source for part in parts) == text
    tags = re.findall(r"<[^>]*>", render_prose(text))
    assert all(re.fullmatch(r'</?(code|math( title="[^"]*")?|m[a-z]+( class=boxed)?)>', tag) for tag in tags)


@pytest.mark.parametrize("text", ["$" * 20_000, r"\[" * 10_000, r"\boxed{" * 3000, "$a" * 10_000, r"$\frac" * 3000])
def test_a_hostile_text_takes_no_long_time(text):
    began = time.process_time()
    mathml.split(text)
    assert time.process_time() - began < 5  # 0.2 is usual; a quadratic search takes minutes


def test_nearly_all_formulas_of_a_benchmark_are_converted():
    if not MATH500.exists():
        pytest.skip("there is no ../shared/data/math500")
    rows = map(json.loads, MATH500.read_text(encoding="utf-8").splitlines())
    found = [inner for row in rows for _, _, inner in mathml._find(row["problem"] + row["solution"])]
    assert len(found) > 5000
    assert sum(mathml.convert(each) is not None for each in found) > 0.98 * len(found)

"""TeX becomes MathML or stays as it is; texts are never lost, and no text takes long."""

import json
import re
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspax.report import mathml
from gspax.report.html import render_prose

MATH500 = Path(__file__).parents[3] / "shared" / "data" / "math500" / "test.jsonl"


ROWS = '<mtr><mtd columnalign="right"><mi>a</mi></mtd></mtr><mtr><mtd columnalign="right"><mi>b</mi></mtd></mtr>'
FENCE = '<mo stretchy="true" fence="true" form="{}">{}</mo>'
LARGE = '<mo minsize="2.047em" maxsize="2.047em">{}</mo>'
BRACE = '<mo stretchy="false">{}</mo>'
MATRIX = "<mtable><mtr><mtd><mn>1</mn></mtd><mtd><mn>2</mn></mtd></mtr><mtr><mtd><mn>3</mn></mtd></mtr></mtable>"


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("12", "<mn>12</mn>"),
        ("1,600.5x", "<mrow><mn>1</mn><mo>,</mo><mn>600.5</mn><mi>x</mi></mrow>"),
        ("a < b - c", "<mrow><mi>a</mi><mo>&lt;</mo><mi>b</mi><mo>−</mo><mi>c</mi></mrow>"),
        (r"\frac{1}{x}", "<mfrac><mn>1</mn><mi>x</mi></mfrac>"),
        (r"\dfrac12", '<mstyle displaystyle="true" scriptlevel="0"><mfrac><mn>1</mn><mn>2</mn></mfrac></mstyle>'),
        ("x^12", "<mrow><msup><mi>x</mi><mn>1</mn></msup><mn>2</mn></mrow>"),
        ("x^{12}_n", "<msubsup><mi>x</mi><mi>n</mi><mn>12</mn></msubsup>"),
        ("a_{i}", "<msub><mi>a</mi><mi>i</mi></msub>"),
        ("f''", "<msup><mi>f</mi><mi>″</mi></msup>"),
        (r"90^\circ", "<msup><mn>90</mn><mo>∘</mo></msup>"),
        (r"\sqrt 2", "<msqrt><mn>2</mn></msqrt>"),
        (r"\sqrt[3]{\pi}", "<mroot><mi>π</mi><mn>3</mn></mroot>"),
        (r"\boxed{5\%}", '<mrow class="boxed"><mrow><mn>5</mn><mi>%</mi></mrow></mrow>'),
        (r"2\,\text{ cm }", '<mrow><mn>2</mn><mspace width="0.167em"></mspace><mtext>\xa0cm\xa0</mtext></mrow>'),
        (r"1\!2", '<mrow><mn>1</mn><mspace width="-0.167em"></mspace><mn>2</mn></mrow>'),
        (r"\sum_{i}^n", "<msubsup><mo>∑</mo><mi>i</mi><mi>n</mi></msubsup>"),
        (r"\sin\Theta", "<mrow><mi>sin</mi><mi>Θ</mi></mrow>"),
        (
            r"\left(3,\infty\right]",
            f"<mrow>{FENCE.format('prefix', '(')}<mn>3</mn><mo>,</mo><mo>∞</mo>{FENCE.format('postfix', ']')}</mrow>",
        ),
        (r"\left.x\right|", f"<mrow>{FENCE.format('prefix', '')}<mi>x</mi>{FENCE.format('postfix', '|')}</mrow>"),
        (
            r"\binom{n}2",
            f'<mrow>{LARGE.format("(")}<mfrac linethickness="0"><mi>n</mi><mn>2</mn></mfrac>{LARGE.format(")")}</mrow>',
        ),
        (r"\begin{bmatrix}1&2\\3\end{bmatrix}", f"<mrow><mo>[</mo>{MATRIX}<mo>]</mo></mrow>"),
        (
            r"\begin{aligned}a\\b\end{aligned}",
            f'<mtable displaystyle="true" rowspacing="3pt">{ROWS}</mtable>',
        ),
        (r"\overline{AB}", '<mover><mrow><mi>A</mi><mi>B</mi></mrow><mo accent="true">―</mo></mover>'),
        (r"\{a\} \& b", f"<mrow>{BRACE.format('{')}<mi>a</mi>{BRACE.format('}')}<mi>&amp;</mi><mi>b</mi></mrow>"),
        (r"\text{<b> & c}", "<mtext>&lt;b&gt;\xa0&amp;\xa0c</mtext>"),
        (r"\href{javascript:f()}{x}", "<mrow><mi>x</mi></mrow>"),
        (r"\style{position:fixed}{x}", "<mrow><mi>x</mi></mrow>"),
    ],
)
def test_a_formula_becomes_mathml(source, wanted):
    assert mathml.render(mathml.convert(source)) == wanted


@pytest.mark.parametrize(
    "source",
    ["", " ", r"\unknown", r"\frac{1}", "{", "}", "{a}}", "x^", "a^b^c", r"\left(x", r"\right)", "50%", r"\sqrt[3",
     "a & b", "\x1b", r"\begin{tikzpicture}x\end{tikzpicture}", r"\begin{matrix}1", r"\begin{matrix}1\end{cases}",
     r"\cancel{x}", r"\hspace{999cm}x", r"\rule{9cm}{9cm}", r"\def\a{xx}\a", r"\newcommand{\a}{xx}\a",
     "x^{" * 60 + "x" + "}" * 60, r"\frac" * 190 + "1", r"\left(" * 150],
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
        (r"Put it in \boxed{}, $\boxed{ }$ or \boxed{\,}.", []),
    ],
)
def test_formulas_are_found_between_delimiters(text, formulas):
    assert [part.source for part in mathml.split(text) if not isinstance(part, str)] == formulas


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [*'${}[]()^_&\\ a1<"', "\\frac", "\\left", "\\right", "\\boxed", "\\begin{matrix}", "\\href", "\\text{"]
        ),
        max_size=40,
    )
)
def test_no_text_is_lost_and_no_markup_is_forged(words):
    text = "".join(words)
    parts = mathml.split(text)
    assert "".join(part if isinstance(part, str) else part.source for part in parts) == text
    tags = re.findall(r"<[^>]*>", render_prose(text))
    assert all(re.fullmatch(r'</?(code|math( title="[^"]*")?|m[a-z]+( [a-z]+="[a-z0-9. -]*")*)>', tag) for tag in tags)


@pytest.mark.parametrize("text", ["$" * 20_000, r"\[" * 10_000, r"\boxed{" * 3000, "$a" * 10_000, r"$\frac" * 3000])
def test_a_hostile_text_takes_no_long_time(text):
    began = time.process_time()
    mathml.split(text)
    assert time.process_time() - began < 5  # 0.5 is usual; a quadratic search takes minutes


def test_nearly_all_formulas_of_a_benchmark_are_converted():
    if not MATH500.exists():
        pytest.skip("there is no ../shared/data/math500")
    rows = map(json.loads, MATH500.read_text(encoding="utf-8").splitlines())
    found = [inner for row in rows for _, _, inner in mathml._find(row["problem"] + row["solution"])]
    assert len(found) > 5000
    assert sum(mathml.convert(each) is not None for each in found) > 0.99 * len(found)

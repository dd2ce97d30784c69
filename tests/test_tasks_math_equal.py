"""Mathematical answers that are the same or not, however they are written."""

import resource
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.tasks.verify.latex import compare as math_equal
from palestra.tasks.verify.latex.compare import echoes, memory_capped, same_answer
from palestra.tasks.verify.latex.normalize import form

pytest.importorskip("math_verify", reason="needs the extra eval")

SAME = [
    # Numbers, percent, money, units, degrees.
    ("1/2", "0.5"),
    (r"\frac12", "2/4"),
    (r"\dfrac{1}{2}", r"\tfrac 1 2"),
    (r"\frac{-1}{2}", r"-\frac{1}{2}"),
    ("13/4", r"3\frac{1}{4}"),
    ("1000", "1,000"),
    (r"10{,}000", r"10,\!000"),
    (r"50\%", "50"),
    (r"50\%", "0.5"),
    (r"\$18.50", "18.5"),
    (r"6\text{ cm}", "6"),
    (r"12\text{ cm}^2", "12 square cm"),
    (r"45 \mbox{ inches}^2", "45"),
    (r"30^\circ", "30"),
    (r"\frac{1}{3}", "0.333333"),  # rounded to six places and more
    (r"\pi", "3.14159265"),
    ("2", "2.0000000"),
    (r"\approx 8.24", "8.24"),
    ("1{,}008{,}016", "1008016"),
    (r"3.2\times10^{5}", "320000"),
    # Expressions.
    (r"2\sqrt{2}", r"\sqrt{8}"),
    (r"\frac{1}{\sqrt2}", r"\frac{\sqrt{2}}{2}"),
    (r"\sqrt4", "2"),
    ("2^3", "8"),
    (r"x^2-4", "(x-2)(x+2)"),
    (r"\frac{x+2}{7}", r"\frac17x+\frac27"),
    ("1.5x", r"\frac{3}{2}x"),
    ("18x^8", "18 x^{8}"),
    ("2*sqrt(3)", r"2\sqrt{3}"),
    ("π", r"\pi"),
    ("3 pi", r"3\pi"),
    ("3+2i", "2i+3"),
    (r"e^{i\pi}", "-1"),
    (r"\cos^2\alpha", r"1-\sin^2\alpha"),
    (r"\sin^2 t", r"1-\cos^2 t"),
    (r"\tan 15^\circ", r"2-\sqrt{3}"),
    (r"\log_2 8", "3"),
    (r"\log(x^2)", r"2\log x"),
    ("10!", "3628800"),
    (r"\binom{10}{3}", "120"),
    (r"2^{100}-2", "2(2^{99}-1)"),
    (r"\frac{1}{2^{98}}", "2^{-98}"),
    ("0", r"\sqrt{2}-\sqrt{2}"),
    (r"3-2f(x)", "-2f(x)+3"),
    (r"\infty", r"+\infty"),
    # Tuples, intervals, sets, lists, matrices.
    ("(1,2)", r"\left( 1 , 2 \right)"),
    ("(1,2)", "(1.0, 4/2)"),
    (r"\{1,2,3\}", "3, 2, 1"),
    ("1,2", r"2 \text{ and } 1"),
    ("x=1 or x=2", "2, 1"),
    (r"1\pm\sqrt2", r"1-\sqrt{2},1+\sqrt{2}"),
    (r"45^\circ, 135^\circ", "135, 45"),
    (r"(-\infty,2)\cup(3,\infty)", r"(3,\infty) \cup (-\infty, 2)"),
    (r"(-\infty,2)\cup(3,\infty)", r"x<2 \text{ or } x>3"),
    (r"x<2 \text{ or } x>3", r"(-\infty,2)\cup(3,\infty)"),
    (r"(-\infty,2)", "x<2"),
    (r"[2,5)", r"2 \le x < 5"),
    (r"[0,\infty)", r"x \geq 0"),
    (r"x \in [-2,7]", "[-2,7]"),
    (r"(-\infty,\infty)", r"\mathbb{R}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{bmatrix} 1 \\ 4/2 \end{bmatrix}"),
    # Equations and names.
    ("x=5", "5"),
    ("5", "x = 2+3 = 5"),
    ("y=2x+1", "2x-y+1=0"),
    ("x^2 + y^2 = 13", "2y^2+2x^2=26"),
    ("AB=12", "12"),
    # Words, letters, digits of other bases, clocks, ratios.
    (r"\text{Sunday}", "sunday."),
    (r"\text{(C)}", "C"),
    (r"(\text{E})", r"\text{E}"),
    (r"\text{A, B}", "B, A"),
    (r"\text{VW}", "VW"),
    ("2112_6", "2112_{6}"),
    ("2112_6", "2112"),
    (r"\text{4:30 p.m.}", "4:30 PM"),
    ("3:1", "3 : 1"),
    (r"\text{no solution}", "No solution"),
    ("**42**", "42"),
    # As keyboards, converters and textbooks write them.
    ("x >= 5", r"x \geq 5"),
    ("x <= 2", r"(-\infty,2]"),
    ("x != 3", r"x \neq 3"),
    ("x < 1", "-x > -1"),
    ("(3,2)", "(p,q)=(3,2)"),
    ("11", r"x\approx 11"),
    (r"\frac13", r"0.\overline{3}"),
    (r"\frac16", r"0.1\overline{6}"),
    ("-e+1", r"1-\mathrm{e}"),
    ("1000", r"1\,000"),
    ("14916", "14 {, }916"),
    ("(11,7)or(7,11)", "(7,11), (11,7)"),
    ("|AB|=1", "1"),
    ("7:32", r"V_{1}:V_{2}=7:32"),
    (r"\frac{NO}{BO}=\frac{1}{\sqrt6}", r"\frac{\sqrt6}{6}"),
    (r"(\frac12,3)", r"\\left(\\frac{1}{2}, 3\\right)"),  # escaped twice
    ("5", "2+3=5"),
    (r"\textbf{(B) } 5", "5"),
    (r"\text{13}", "13"),
]
OTHER = [
    ("-2", "2"),  # the sign is not decoration
    (r"-\frac12", "1/2"),
    ("5", "-5"),
    ("x-2", "x+2"),
    ("-x", "x"),
    ("(1,2)", "(2,1)"),
    ("(1,2)", "[1,2]"),
    ("[0,1)", "[0,1]"),
    ("(1,2)", "(1,2,3)"),
    ("1,2", "1,3"),
    (r"(-\infty,2)", r"(-\infty,2]"),
    ("x<2", "x>2"),
    (r"(-\infty,2)\cup(3,\infty)", r"(-\infty,2)"),
    (r"(-\infty,2)\cup(3,\infty)", r"x<2 \text{ or } x>4"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1&2\end{pmatrix}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}"),
    ("x^2-4", "(x-2)(x-2)"),
    (r"\sqrt{x^2}", "x"),
    (r"\pi R^2", r"\pi r^2"),
    ("x", "y"),
    ("x=5", "y=5"),
    ("y=2x+1", "y=2x+2"),
    ("x^2 + y^2 = 13", "x^2 - y^2 = 13"),
    ("3+2i", "3-2i"),
    ("2^{100}-2", "2^{100}-1"),
    ("2^{2008}-2", "2^{2008}-1"),
    ("10^{-20}", "10^{-21}"),
    (r"\frac{1}{3}", "0.33333"),
    (r"\pi", "3.14"),
    ("7", "7.0000001"),
    ("50", "0.5"),
    (r"50\%", "5"),
    ("2112_6", "2112_7"),
    (r"\text{east}", r"\text{seat}"),  # no product of letters
    ("odd", "even"),
    ("C", "D"),
    (r"\text{4:30 p.m.}", "4:30 a.m."),
    ("3:1", "1:3"),
    ("5", "-" * 1001 + "5"),
    ("-5", "(" * 40 + "5" + ")" * 40),
    (r"\text{AB}", "-AB"),
    ("1/0", "2/0"),
    (r"\infty", r"-\infty"),
    ("2(3)", "5"),  # a product, no mixed number
    (r"2\cdot\frac12", "5/2"),
    ("6", "2x=6"),
    ("12", r"\text{twelve}"),
    ("18", "17=18"),
    ("18", "x=17=18"),
    ("7=11a+c", "11a+c"),
    (r"\frac13", r"0.\overline{4}"),
    ("1000", "10 00"),
    ("5", ""),
    ("5", r"\frac{"),
    ("3-2f(x)", "-2f(x)+4"),
    (r"f(2) < f(1) < f(4)", r"f(1) < f(2) < f(4)"),
]


@pytest.mark.parametrize(("gold", "answer"), SAME)
def test_same_answer_written_otherwise_is_the_same(gold, answer):
    assert same_answer(gold, answer) is True
    assert same_answer(answer, gold) is True or form(gold).places < form(answer).places  # rounding has a direction


@pytest.mark.parametrize(("gold", "answer"), OTHER)
def test_same_answer_of_another_value_is_not(gold, answer):
    assert not same_answer(gold, answer)
    assert not same_answer(answer, gold)


def test_set_with_a_member_twice_is_the_set_unless_the_reference_counts_them():
    assert same_answer(r"\{1,2\}", r"\{1,2,2\}")
    assert same_answer("(1,2),(2,1)", "(2,1),(1,2),(2,1)")
    assert not same_answer("2,2,3", "2,3")
    assert not same_answer(r"\{1,2\}", r"\{1,2,3\}")


@pytest.mark.parametrize(
    ("question", "gold", "answer", "echo"),
    [
        ("Compute $99^2+99+1$.", "9901", "99^2+99+1", True),
        ("Compute $99^2+99+1$.", "9901", r"x = (99^2 + 99 + 1)", True),
        ("Compute $99^2+99+1$.", "9901", "99^2+99+1+0", True),
        ("Compute $99^2+99+1$.", "9901", "99^2+99+1=9901", False),
        ("Compute 99^2 + 99 + 1", "9901", "99^2+99+1", True),  # a question without marked formulas
        (r"Write $\frac{3}{20}$ as a decimal.", "0.15", "3/20", True),
        (r"Write $\frac{3}{20}$ as a decimal.", "0.15", ".150", False),
        (r"Which is larger, $\frac{1}{2}$ or $\frac13$?", "1/2", r"\dfrac12", False),
        (r"A side is $6\text{ cm}$ and another $4$. Which is longer?", r"6\text{ cm}", "6", False),
        ("How many pairs?", r"\binom{10}{2}", "45", False),
        ("How many of 10 and 2?", "45", r"\binom{10}{2}", False),
        ("", "45", r"\binom{10}{2}", False),
    ],
)
def test_echo_of_the_question_is_told_from_an_answer(question, gold, answer, echo):
    assert same_answer(gold, answer)
    assert echoes(question, gold, answer) is echo


pieces = [
    *r"0123456789xyi.,;:=<>+-*/^_(){}[]|&% ",
    "\\",
    r"\frac",
    r"\sqrt",
    r"\text{",
    r"\pi",
    r"\pm",
    r"\cup",
    r"\leq",
]
latex = st.lists(st.sampled_from(pieces) | st.characters(codec="utf-8"), max_size=40).map("".join)


@given(latex)
def test_form_of_any_text_is_found_and_the_same_as_itself(text):
    assert str(form(text)) == str(form(text))
    assert same_answer(text, text) is True


@given(st.fractions(max_denominator=50), st.fractions(max_denominator=50))
def test_same_answer_of_two_numbers_is_their_equality(one, other):
    written = [rf"\frac{{{value.numerator}}}{{{value.denominator}}}" for value in (one, other)]
    assert same_answer(*written) == (one == other)
    assert same_answer(written[0], str(one)) is True
    assert not one or not same_answer(written[0], str(-one))


@settings(max_examples=12)
@given(st.lists(st.integers(-9, 9), min_size=2, max_size=4), st.integers(1, 3))
def test_same_answer_of_a_product_is_its_expansion(roots, change):
    factors = "".join(f"(x{-root:+d})" for root in roots)
    terms = [1]
    for root in roots:
        terms = [a - root * b for a, b in zip([*terms, 0], [0, *terms], strict=True)]
    powers = range(len(roots), -1, -1)
    expanded = "".join(f"{term:+d}x^{{{power}}}" for term, power in zip(terms, powers, strict=True))
    assert same_answer(factors, expanded) is True
    assert same_answer(factors, f"{expanded}+{change}") is False
    assert same_answer(f"{factors}=0", f"{change}({expanded})=0") is True


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_memory_capped_refuses_a_large_block_and_lets_go_of_the_limit():
    before = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(MemoryError), memory_capped(True):
        bytearray(math_equal.MEMORY * 2)
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    assert len(bytearray(1 << 20)) == 1 << 20

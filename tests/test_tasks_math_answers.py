r"""Final answers in texts and numbers as people write them: `\boxed`, "the answer is", signs, thousands, fractions."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.tasks.verify.latex.extract import cut, final_answer, last_boxed, number_in
from palestra.tasks.verify.numbers import last_number, parse_number, stated_number

# Numbers.


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("18", 18),
        ("-18", -18),
        ("−18", -18),  # the typographer's minus
        ("00018", 18),
        ("18.", 18),
        ("18.00", 18),
        (".5", "1/2"),
        ("1,234", 1234),
        ("1,234,567.5", "2469135/2"),
        (r"10{,}000", 10000),
        (r"112,\!875", 112875),
        (r"11,\! 111,\! 100", 11111100),
        ("$18.50", "37/2"),
        (r"\$5", 5),
        ("-$5", -5),
        ("$-5", -5),
        ("3/4", "3/4"),
        ("33/2", "33/2"),
        ("-3/4", "-3/4"),
        ("1 1/2", "3/2"),
        ("-1 1/2", "-3/2"),
        (r"\frac{3}{4}", "3/4"),
        (r"-\dfrac{3}{4}", "-3/4"),
        (r"\frac{-33}{2}", "-33/2"),
        (r"-\frac{-33}{2}", "33/2"),
        (r"2\frac{1}{2}", "5/2"),
        ("1e6", 1000000),
        (r"3.2 \times 10^{5}", 320000),
        ("3.2 x 10^-5", "1/31250"),
        ("18 dollars", 18),
        ("5 cm", 5),
        ("12 square units", 12),
        ("50%", 50),
        ("50 percent", 50),
        (r"-50\%", -50),
    ],
)
def test_parse_number_of_what_people_write_is_its_exact_value(text, value):
    number = parse_number(text)
    assert number is not None
    assert number.value == Fraction(value)
    assert number.percent == text.endswith(("%", "percent"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "-",
        "$",
        "%",
        "1,23",
        "5 x",
        "3 pi",
        "2 sin x",
        "1/0",
        "--5",
        "-$-5",
        "5-3",
        "10-15",
        "2^5",
        "1e999",
        "1" * 100_000,
        "five",
        "5 percent of it",
        r"2\frac{-1}{2}",
    ],
)
def test_parse_number_of_what_is_no_number_is_none(text):
    assert parse_number(text) is None


@given(st.fractions(max_denominator=1000), st.booleans(), st.sampled_from(["", "$", "£"]), st.sampled_from(["", "%"]))
def test_parse_number_of_any_fraction_is_that_fraction(value, latex, currency, percent):
    up, down = value.numerator, value.denominator
    text = f"{currency}\\frac{{{up}}}{{{down}}}{percent}" if latex else f"{currency}{up}/{down}{percent}"
    number = parse_number(text)
    assert number is not None
    assert (number.value, number.percent) == (value, bool(percent))


@given(st.decimals(allow_nan=False, allow_infinity=False, places=3, min_value=-(10**9), max_value=10**9), st.booleans())
def test_parse_number_of_any_decimal_is_that_decimal(value, grouped):
    number = parse_number(f"{value:,.3f}" if grouped else f"{value:.3f}")
    assert number is not None
    assert number.value == Fraction(value)
    assert number.places == 3


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("I get 42 as the answer", "42"),
        ("First 10, then 20, so 30 in total.", "30"),
        ("a range of 10-15", "15"),  # no -15
        ("20-5=15", "15"),
        ("x=-5 apples", "-5"),
        ("(5)-3", "3"),
        ("a-5", "5"),
        ("- 5 apples", "5"),  # an item of a list
        ("it fell to -3", "-3"),
        ("costs $1,234.50.", "$1,234.50"),
        ("It is 3/4.", "3/4"),
        ("1 1/2 cups", "1 1/2"),
        ("up 50%.", "50%"),
        ("on 7/8/2020", "2020"),
        ("it is not 18", None),
        ("it isn't 18 but 19", "19"),
        ("it cannot be $18", None),
        ("AZYUK25A", None),
        ("nothing", None),
        ("", None),
    ],
)
def test_last_number_of_a_text_keeps_sign_and_thousands(text, found):
    assert last_number(text) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("The answer is 18.", "18"),
        ("so the answer is 18", "18"),
        ("The answer is $18.\n#### 20", "20"),
        ("#### -1,234", "-1,234"),
        ("The final answer is: **42**", "42"),
        ("The answer is $-2$", "-2"),
        ("The answer is 5. No: the answer is 6.", "6"),
        ("The answer is not 5", None),
        ("The answer is 9 * 2 = 18.", "18"),
        ("#### 3 + 4 = 7", "7"),
        ("The answer is **$5 + $10 = $15**.", "15"),
        ("The answer is (3+4)*2 = 7*2 = 14.", "14"),
        ("The answer is 5. 2 + 4 = 6", "5"),
        ("The answer is 18 = x", "18"),
        ("I get 42 as the answer", None),
    ],
)
def test_stated_number_is_what_follows_the_last_mark(text, found):
    assert stated_number(text) == found


@pytest.mark.parametrize(
    "piece", ["1", "1,", "111,", "-", "$", " ", "1 ", "1/", "\\frac{1", "1e", ".1", "#### ", "\\boxed{", "{", "1 1/ "]
)
def test_rules_for_numbers_on_a_long_text_take_linear_time(piece):
    # Judged on the event loop itself. What grows with the square of the length does not end within the test's limit.
    text = piece * (200_000 // len(piece))
    last_number(text), stated_number(text), stated_number(f"#### {text}"), parse_number(text)
    assert last_boxed(text) is None


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "piece", [r"\(", r"\[", "$$", "$", r"\$", "$$x", r"\( $", "not ", r"\boxed{1},", "answer is $1$ or "]
)
def test_final_answer_of_a_long_text_takes_linear_time(piece):
    # Quadratic, the 32 KB of `\(` that took 5 s would take seven minutes at this length.
    text = piece * (300_000 // len(piece))
    found = final_answer(text)
    assert found is None or found in text


# Final answers.


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"so \boxed{5}.", "5"),
        (r"\boxed{\frac{1}{2}} done", r"\frac{1}{2}"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{1} then \boxed{2", "1"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{a}b}", "a"),
        (r"\fbox{7}", "7"),
        (r"\boxed 2$.", "2"),
        (r"\boxed{", None),
        (r"\boxed", None),
        ("boxed{5}", None),
        (r"\boxed{}", ""),
        (r"$\boxed{1}$ and $\boxed{2}$.", "1, 2"),
        (r"\boxed{1}, \quad \text{or} \boxed{2}", "1, 2"),
        (r"\boxed{2}, \boxed{2}", "2"),
        (r"\boxed{3} is wrong, so \boxed{2}", "2"),
    ],
)
def test_last_boxed_matches_braces(text, found):
    assert last_boxed(text) == found


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        (r"It is 7, so \boxed{5}. That took 3 steps.", "5", "5"),
        ("The answer is 7", "7", "7"),
        ("The answer is 3.5. That is all.", "3.5", "3.5"),
        (r"The answer is $\frac{1}{2}$.", r"\frac{1}{2}", r"\frac{1}{2}"),
        ("Final Answer: The final answer is $x+1$. I hope it is correct.", "x+1", "x+1"),
        ("answer: **12**", "12", "12"),
        ("The answer to the question is (A)", "(A)", "(A)"),
        ("#### 18", "18", "18"),
        ("The answer is $5$ or $6$.", "5, 6", "5, 6"),
        ("The answer is not 18", None, None),
        ("I get 42 as the answer", None, "42"),
        ("so $x = 5$.", None, "x = 5"),
        (r"Hence \[ x = 3 \]", None, "x = 3"),
        (r"thus \(y=2\)", None, "y=2"),
        ("we get $x^2$ and so 7 apples", None, "7"),
        ("Paris", None, None),
        ("", None, None),
        (r"\boxed{}", None, None),
        (r"<think>maybe \boxed{3}</think> The answer is 4", "4", "4"),
        (r"<think>maybe \boxed{3}</think>", None, None),
    ],
)
def test_final_answer_takes_the_strictest_that_is_there(text, strict, flexible):
    assert final_answer(text, flexible=False) == strict
    assert final_answer(text) == flexible


def test_number_in_a_sentence_is_the_first_word_or_the_last_number():
    assert number_in("18 dollars in 3 days") == "18"
    assert number_in("that Bob, who is 7, has 5 apples") == "5"
    assert number_in("that nobody knows") is None


def test_cut_leaves_the_next_question_out():
    text = "The answer is 18\n\nQuestion: 7 + 1?"
    assert cut(text, ("Question:", "Q:")) == "The answer is 18\n\n"
    assert cut(text, ()) == text

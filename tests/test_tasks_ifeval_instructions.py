"""The 25 kinds of instruction under Google's names: texts that follow each and texts that do not."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.tasks.verify import instructions
from palestra.tasks.verify.instructions import (
    INSTRUCTIONS,
    Instruction,
    count_capital_words,
    count_sentences,
    instructions_of,
)

ENGLISH = "The children went to the park in the morning and played there until it was dark."

# name → its arguments, texts that follow it, texts that do not
CASES: dict[str, list[tuple[dict[str, Any], list[str], list[str]]]] = {
    "keywords:existence": [
        (
            {"keywords": ["mom", "Mother"]},
            ["My MOM is a mother.", "moms and motherhood"],
            ["My mom.", "mother", "mo m mother"],
        ),
        ({"keywords": ["c++ (basic)"]}, ["I know C++ (Basic) well"], ["c+++ (basic", "c basic", "ccc basic"]),
    ],
    "keywords:frequency": [
        (
            {"keyword": "war", "frequency": 2, "relation": "at least"},
            ["War, warfare", "war war war"],
            ["War.", "peace"],
        ),
        ({"keyword": "war", "frequency": 2, "relation": "less than"}, ["War.", "peace"], ["war and war", "Warwar"]),
        ({"keyword": "a.b", "frequency": 1, "relation": "at least"}, ["see a.b there"], ["axb a-b", "a..b"]),
    ],
    "keywords:forbidden_words": [
        ({"forbidden_words": ["rock", "can"]}, ["A rocket and a candle.", "scan"], ["Rock!", "it CAN be", "x-can-y"]),
        ({"forbidden_words": ["C++", ".*"]}, ["C and c+", "anything"], ["I like c++.", "the pattern .*"]),
    ],
    "keywords:letter_frequency": [
        (
            {"letter": "Q", "let_frequency": 2, "let_relation": "at least"},
            ["Quick query", "qq", "QQQ"],
            ["Quick", "none at all"],
        ),
        ({"letter": "q", "let_frequency": 2, "let_relation": "less than"}, ["Quick", "none"], ["Qq"]),
        ({"letter": "#", "let_frequency": 2, "let_relation": "at least"}, ["# a\n# b"], ["# a", "hash hash"]),
    ],
    "language:response_language": [
        (
            {"language": "de"},
            ["Ich gehe heute mit meinem Hund in den Wald und morgen nach Berlin."],
            [ENGLISH, "12345", "!?", "Je vais à l'école tous les matins avec mes amis."],
        ),
        ({"language": "hi"}, ["मुझे यह किताब बहुत पसंद है और मैं इसे रोज पढ़ता हूँ।"], [ENGLISH, "😀"]),
        ({"language": "ko"}, ["나는 오늘 아침에 학교에 갔다. 친구들과 함께 점심을 먹었다."], [ENGLISH]),
    ],
    "length_constraints:number_sentences": [
        (
            {"num_sentences": 3, "relation": "at least"},
            ["Yes. No! Is it C?", "One. Two. Three. Four."],
            ["One. Two.", "One"],
        ),
        ({"num_sentences": 3, "relation": "less than"}, ["One. Two.", "one two three"], ["One is. Two is. Three."]),
    ],
    "length_constraints:number_paragraphs": [
        (
            {"num_paragraphs": 2},
            ["one\n***\ntwo", "one***two", "***\none\n***\ntwo\n***", "one\n\nstill one\n\n***\n\ntwo"],
            [
                "one",
                "one\n\ntwo",
                "one\n***\ntwo\n***\nthree",
                "one\n***\n\n***\ntwo",
                "one ****** two",
                "one * * * two",
            ],
        ),
    ],
    "length_constraints:number_words": [
        ({"num_words": 3, "relation": "at least"}, ["one two three", "it's me", "a-b c"], ["one two", "... !!! ???"]),
        ({"num_words": 3, "relation": "less than"}, ["one two", "* * *"], ["one two three"]),
    ],
    "length_constraints:nth_paragraph_first_word": [
        (
            {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Weekend"},
            [
                "One here.\n\nWeekend plans",
                'One.\n\n"Weekend," he said',
                "One.\n\n'weekend.' Yes",
                "One.\n\n weekend!\n\n",
            ],
            [
                "Weekend one.\n\nTwo",
                "One.\n\nWeekends here",
                "One.\nWeekend",
                "One.\n\nWeekend\n\nThree",
                "One.\n\n(Weekend)",
                "\n\nOne\n\nWeekend",  # here the first is the empty one, as in Google's count
            ],
        ),
    ],
    "detectable_content:number_placeholders": [
        (
            {"num_placeholders": 2},
            ["[name] at [address]", "[a][b][c]", "[] [x y]"],
            ["[name]", "none", "[a\nb] [c]", "]["],
        ),
    ],
    "detectable_content:postscript": [
        (
            {"postscript_marker": "P.S."},
            ["Hello.\nP.S. Bye", "p. s. bye", "P.P.S. and so"],
            ["PS bye", "P.P.S", "none"],
        ),
        ({"postscript_marker": "P.P.S"}, ["Hello.\nP.P.S Bye", "p. p. s"], ["P.S. bye", "PPS"]),
        ({"postscript_marker": "(last)"}, ["So it is. (LAST) word"], ["last word"]),
    ],
    "detectable_format:number_bullet_lists": [
        (
            {"num_bullets": 2},
            ["* one\n* two", "- one\n- two", "Here:\n  * one\n\n\t- two\nBye", "*one\n-two", "**Bold**\n* one\n* two"],
            ["* one", "* one\n* two\n* three", "1. one\n2. two", "• one\n• two", "one * two * three"],
        ),
    ],
    "detectable_format:constrained_response": [
        (
            {},
            ["My answer is yes.", "I think so. My answer is maybe. Well.", "  My answer is no.\n"],
            ["my answer is yes.", "My answer is no", "Yes.", "My answer is: maybe."],
        ),
    ],
    "detectable_format:number_highlighted_sections": [
        (
            {"num_highlights": 2},
            ["*one* and *two*", "**one** and *two*", "*a b c* **d e**"],
            ["*one* and two", "** ** **\n**", "*one\ntwo* three", "_one_ _two_", "**one**"],
        ),
    ],
    "detectable_format:multiple_sections": [
        (
            {"section_spliter": "SECTION", "num_sections": 2},
            ["SECTION 1\nhello\nSECTION 2\nbye", "SECTION1 a SECTION2 b SECTION 33 c"],
            ["SECTION 1\nhello", "Section 1\nSection 2", "SECTION A SECTION B"],
        ),
        ({"section_spliter": "D.", "num_sections": 1}, ["D. 1"], ["Da 1", "D 1"]),
    ],
    "detectable_format:json_format": [
        (
            {},
            ['{"a": [1, 2]}', " [1] ", '```json\n{"a": 1}\n```', "```JSON\n{}\n```", "```\n[]\n```"],
            ["{a: 1}", "Here it is: {}", '{"a": 1,}', "```json\n{\n```", "[" * 100_000, ""],
        ),
    ],
    "detectable_format:title": [
        (
            {},
            ["<<poem of joy>>\nRoses", "text <<a>> text", "<<<a>>>"],
            ["<poem>", "<< >>", "<<>>", "<<poem\nof joy>>", ">>a<<", "# poem"],
        ),
    ],
    "combination:two_responses": [
        (
            {},
            ["one\n******\ntwo", "one******two", "******one******two", "one\n******\ntwo\n******\n"],
            [
                "one",
                "one\n******\none",
                "one\n***\ntwo",
                "one******two******three",
                "one************two",
                "******one******",
            ],
        ),
    ],
    "combination:repeat_prompt": [
        (
            {"prompt_to_repeat": "Write a poem.\n"},
            ["Write a poem.\nRoses", "  WRITE A POEM. Roses", "Write a poem."],
            ["Sure! Write a poem. Roses", "Write a poem, roses", "Write"],
        ),
    ],
    "startend:end_checker": [
        (
            {"end_phrase": "Any other questions?"},
            ["Bye. Any other questions?", "ANY OTHER QUESTIONS? \n", '"So. Any other questions?"'],
            ["Any other questions? No.", "Any other question?", "Any other questions"],
        ),
    ],
    "startend:quotation": [
        (
            {},
            ['"all of it"', ' "all of it"\n', '""'],
            ['"', "'all of it'", '"all" of it', "“all of it”", 'all "of it"'],
        ),
    ],
    "change_case:capital_word_frequency": [
        (
            {"capital_frequency": 2, "capital_relation": "at least"},
            ["NASA and ESA", "I AM here", "It is *VERY* (BAD)", "NASA's COVID-19", "I'M"],
            ["NASA and Esa", "none", "Nasa's USAs", "1 2 3"],
        ),
        ({"capital_frequency": 2, "capital_relation": "less than"}, ["NASA only", "none"], ["NASA, ESA"]),
    ],
    "change_case:english_capital": [
        (
            {},
            [ENGLISH.upper(), "THE QUICK BROWN FOX JUMPS OVER 2 LAZY DOGS."],
            [ENGLISH, "ICH GEHE HEUTE IN DEN WALD.", "123"],
        ),
    ],
    "change_case:english_lowercase": [
        ({}, [ENGLISH.lower()], [ENGLISH, "ich gehe heute mit meinem hund in den wald.", "123", ENGLISH.upper()]),
    ],
    "punctuation:no_comma": [
        ({}, ["no comma; here", "1.000"], ["one, two", ",", "1,000"]),
    ],
}


def instruction(name: str, arguments: dict[str, Any]) -> Instruction:
    (found,) = instructions_of({"instruction_id_list": [name], "kwargs": [arguments]})
    return found


def test_cases_cover_all_25_kinds():
    assert set(CASES) == set(INSTRUCTIONS)
    assert len(INSTRUCTIONS) == 25


@pytest.mark.parametrize(
    ("name", "arguments", "text", "expected"),
    [
        (name, arguments, text, expected)
        for name, cases in CASES.items()
        for arguments, follow, fail in cases
        for expected, texts in ((True, follow), (False, fail))
        for text in texts
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else None,
)
def test_instruction_strict_on_a_text(name: str, arguments: dict[str, Any], text: str, expected: bool):
    assert instruction(name, arguments).strict(text) is expected


@pytest.mark.parametrize("name", CASES)
def test_instruction_that_is_followed_strictly_is_followed_loosely(name: str):
    for arguments, follow, _ in CASES[name]:
        assert all(instruction(name, arguments).loose(text) for text in follow)


@given(st.text(alphabet="[]ab\n", max_size=40))
def test_number_of_placeholders_is_that_of_the_pattern(text: str):
    count = len(re.findall(r"\[.*?\]", text))
    assert instructions.number_placeholders(text, num_placeholders=count)
    assert not instructions.number_placeholders(text, num_placeholders=count + 1)


@given(st.text(alphabet="<>a \n", max_size=40))
def test_title_equals_the_pattern(text: str):
    expected = any(found.lstrip("<").rstrip(">").strip() for found in re.findall(r"<<[^\n]+>>", text))
    assert instructions.title(text) == expected


@given(st.text(alphabet="* a\n", max_size=40), st.integers(0, 4))
def test_number_paragraphs_equals_the_definition(text: str, count: int):
    parts = re.split(r"\s?\*\*\*\s?", text)
    blank = [not part.strip() for part in parts]
    outer = len({0, len(parts) - 1} & {place for place, one in enumerate(blank) if one})
    expected = not any(blank[1:-1]) and len(parts) - outer == count
    assert instructions.number_paragraphs(text, num_paragraphs=count) == expected


@given(st.text(max_size=60), st.text(min_size=1, max_size=5))
def test_occurrences_take_words_for_words(text: str, word: str):
    """Whatever is in it: no pattern, no error. In these texts capitals of one letter are one letter."""
    small, word = text.lower(), word.lower()
    if len(small) == len(text) and small.isascii() and word.isascii():
        assert instructions.occurrences(text, word) == small.count(word)
    assert instructions.occurrences(text, word, whole=True) <= instructions.occurrences(text, word)


@pytest.mark.parametrize(
    "unit", ["<<", "[", "* ", "***", "\n", "\n\n", "- ", '"', "p.", "A", "a.", "!? ", "[" + "\n", "*a"]
)
@pytest.mark.parametrize("name", sorted(set(INSTRUCTIONS) - {"language:response_language"}))
def test_instruction_on_half_a_million_odd_characters_takes_linear_time(name: str, unit: str):
    """What is quadratic takes minutes here."""
    arguments = CASES[name][0][0]
    instruction(name, arguments).strict(unit * (500_000 // len(unit)))


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        (" \n ", 0),
        ("One", 1),
        ("One. Two! Three? Four", 4),
        ("one. two. three.", 3),
        ("Mr. Smith met Dr. Jones vs. Ms. Doe.", 1),
        ("“Mr. Smith,” she said. (He left.) Then rain.", 3),
        ("See e.g. this, i.e. that, cf. Fig. 3 of J. Doe et al. 2020.", 1),
        ("We saw apples, pears, etc. The rest was gone.", 2),
        ("It is 3.14, not 3.15. Visit www.example.com today.", 2),
        ("Wait... what? Well... Yes.", 3),
        ("He lives in the U.S. It is big. The U.S. Senate met.", 3),
        ("“Stop!” he cried. *Why?* Because.", 4),
        ("1. First point. 2. Second point.", 4),
        ("3. lower case item", 1),
        ("No end here\n* one\n* two", 1),
        ("It was he and I. The others left.", 2),
        ("Really?! Yes!!! No.", 3),
    ],
)
def test_count_sentences_by_rules(text: str, count: int):
    assert count_sentences(text) == count


@given(st.lists(st.sampled_from(["The cat sat", "It rained", "We left", "Go"]), min_size=1, max_size=8), st.data())
def test_count_sentences_of_plain_sentences_is_their_number(sentences: list[str], data: st.DataObject):
    text = "".join(one + data.draw(st.sampled_from([". ", "! ", "?\n", ".\n\n"])) for one in sentences)
    assert count_sentences(text) == len(sentences)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        ("NASA, ESA; JAXA: (CNES) [ISRO]", 5),
        ("**BOLD** _ITALIC_ `CODE` \"QUOTED\" 'SINGLE'", 5),
        ("DON'T I'M IT'S", 6),
        ("NASA's U.S. X-RAY COVID-19 A/B", 5),
        ("Nasa usa 42 --- AB--CD", 2),
        ("ÉCOLE ПРИВЕТ 学校", 2),
    ],
)
def test_count_capital_words_by_rules(text: str, count: int):
    assert count_capital_words(text) == count

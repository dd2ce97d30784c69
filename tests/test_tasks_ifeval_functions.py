"""The 25 kinds of instruction under AllenAI's names: texts that follow each and texts that do not."""

from typing import Any

import pytest

from palestra.tasks.verify.instructions import FUNCTIONS, REPEAT, instructions_of

TEN = "one two three four five six seven eight nine ten"

# name → its arguments, texts that follow it, texts that do not
CASES: dict[str, list[tuple[dict[str, Any], list[str], list[str]]]] = {
    "verify_keywords": [
        ({"keyword_list": ["hello", "Test"]}, ["HELLO testing"], ["hello", ""]),
        ({"keyword_list": ["a.c"]}, ["A.C"], ["abc"]),
    ],
    "verify_keyword_frequency": [
        (
            {"word": "test", "N": 3},
            ["Test TEST test", "test-test, (test)"],
            ["test test", "test " * 4, "tests test test"],
        ),
        ({"word": "ice cream", "N": 1}, ["I like ice cream."], ["ice", "ice cream and ice cream"]),
    ],
    "validate_forbidden_words": [
        ({"forbidden_words": ["bad", "wrong"]}, ["This is good", "b a d"], ["This is BAD", "badly", "wrong"]),
    ],
    "verify_letter_frequency": [
        ({"letter": "a", "N": 3}, ["aaa", "AaA", "a-a-a b"], ["aa", "aaaa"]),
        ({"letter": "x", "N": 0}, ["none here"], ["X"]),
    ],
    "validate_response_language": [
        (
            {"language": "de"},
            ["Ich gehe heute mit meinem Hund in den Wald."],
            ["I walk the dog in the woods today.", "1"],
        ),
    ],
    "verify_paragraph_count": [
        (
            {"N": 3},
            ["One\n* * *\nTwo\n* * *\nThree", "One\n***\nTwo\n***\nThree", "One * * * Two *** Three"],
            ["One\n* * *\nTwo", "One\n* * *\n* * *\nThree", "One\n\nTwo\n\nThree", "* * *\nOne\n* * *\nTwo"],
        ),
        ({"N": 1}, ["One **bold** * item"], ["One * * * Two"]),
    ],
    "validate_word_constraint": [
        ({"N": 5, "quantifier": "at least"}, ["one two three four five"], ["one two three four"]),
        ({"N": 3, "quantifier": "at most"}, ["one two three", "one"], ["one two three four"]),
        ({"N": 10, "quantifier": "around"}, [TEN, TEN + " eleven", TEN[:-4]], ["one two", TEN + " and two more"]),
        ({"N": 3, "quantifier": "exactly"}, ["it's a-b c"], ["one two", TEN]),
        ({"N": 3, "quantifier": "at_most"}, ["one two three"], ["one two three four"]),
        ({"N": 3, "quantifier": "at_least"}, ["one two three"], ["one two"]),
    ],
    "verify_sentence_constraint": [
        ({"N": 3, "quantifier": "at least"}, ["First one. Second one. Third one!"], ["First one. Second one."]),
        ({"N": 3, "quantifier": "around"}, ["One is. Two is.", "One is. Two is. Three is. Four is."], ["One is."]),
        ({"N": 1, "quantifier": "at most"}, ["Mr. Smith left."], ["He left. So did I."]),
    ],
    "validate_paragraphs": [
        (
            {"N": 3, "i": 2, "first_word": "Second"},
            ["First.\n\nSecond one.\n\nThird.", "First.\n\nSecond, one.\n\nThird.\n\n"],
            [
                "First.\n\nWrong.\n\nThird.",
                "First.\n\nSecond.",
                "First.\n\nSecondary.\n\nThird.",
                "Second.\n\nA.\n\nB.",
            ],
        ),
        ({"N": 1, "i": 2, "first_word": "Second"}, [], ["Second.", "Second.\n\nSecond."]),
    ],
    "verify_postscript": [
        ({"postscript_marker": "P.S."}, ["Main.\n\nP.S. Don't forget!"], ["Main P.S.", "P.S. \n", "p.s. no", "none"]),
        ({"postscript_marker": "Before I forget:"}, ["Bye. Before I forget: buy milk"], ["Before I forget buy milk"]),
    ],
    "validate_placeholders": [({"N": 2}, ["Hello [NAME] in [PLACE]!"], ["Hello [NAME]!", "[[a"])],
    "verify_bullet_points": [
        ({"N": 2}, ["- a\n- b", "* a\n* b", "**Title**\n* a\n- b"], ["- a", "- a\n- b\n- c", "1. a\n2. b"]),
    ],
    "validate_title": [({}, ["<<My Title>>\nText"], ["# My Title\nText", "<<>>"])],
    "validate_choice": [
        ({"options": ["a)", "b)"]}, ["a)", "I take B)."], ["d)", "", "a", "b"]),
        (
            {"options": "yes/no/maybe/"},
            ["Yes.", "well, maybe", "no"],
            ["yesterday", "nothing", "Perhaps. Who can tell?", "y"],
        ),
        ({"options": "I know or I don't know"}, ["I don't know", "I know."], ["who knows", "or"]),
        ({"options": "Option A, Option B"}, ["So: Option B"], ["Option C", "Option"]),
    ],
    "validate_highlighted_sections": [({"N": 2}, ["*a* and *b c*", "*a* and **b**"], ["*a*", "** ** ** **"])],
    "validate_sections": [
        (
            {"N": 2, "section_splitter": "Chapter:"},
            ["Chapter: 1\nA\nChapter: 2\nB", "chapter:1 CHAPTER:2 Chapter: 3"],
            ["Chapter: 1\nA", "Chapter: A Chapter: B", "Chapter 1 Chapter 2"],
        ),
    ],
    "validate_json_format": [({}, ['{"key": "value"}', "[1, 2]", "```json\n{}\n```"], ["Not JSON", "Here: {}", ""])],
    "validate_repeat_prompt": [
        ({"original_prompt": "Say hi."}, ["Say hi. Hi.", "say hi."], ["Hi. Say hi.", "Say"]),
        # As the rows have it, although the sentence says of itself that it is not to be repeated.
        (
            {"original_prompt": f"{REPEAT} Make up a poem."},
            ["Make up a poem. Roses are red", f"{REPEAT} Make up a poem. Roses"],
            ["Roses are red", "Sure! Make up a poem."],
        ),
        ({"original_prompt": REPEAT}, [f"{REPEAT} yes"], ["anything"]),
    ],
    "validate_two_responses": [
        (
            {},
            ["One\n******\nTwo"],
            ["Same\n******\nSame", "One\n---\nTwo", "One\n***\nTwo", "One******", "a******b******c"],
        ),
    ],
    "validate_uppercase": [({}, ["HELLO 123 WORLD"], ["Hello World", "123"])],
    "validate_lowercase": [({}, ["hello 123 world"], ["Hello World", "123"])],
    "validate_frequency_capital_words": [
        ({"N": 3, "quantifier": "at least"}, ["This is VERY IMPORTANT INFO"], ["This is IMPORTANT INFO"]),
        ({"N": 2, "quantifier": "at most"}, ["This is IMPORTANT", "none"], ["IT IS ME"]),
        ({"N": 10, "quantifier": "around"}, ["AB " * 9, "AB " * 11], ["AB " * 8, "AB " * 12]),
    ],
    "validate_end": [
        ({"end_phrase": "The End"}, ["Text The End", "The End  \n"], ["The End.", "the end", "The End of it"])
    ],
    "validate_quotation": [({}, ['"quoted"', ' "quoted" '], ["'quoted'", "not", '"'])],
    "validate_no_commas": [({}, ["Hello world."], ["Hello, world"])],
}


def test_cases_cover_all_25_functions():
    assert set(CASES) == set(FUNCTIONS)
    assert len(FUNCTIONS) == 25


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
def test_function_strict_on_a_text(name: str, arguments: dict[str, Any], text: str, expected: bool):
    (instruction,) = instructions_of({"ground_truth": {"func_name": name, **arguments}})
    assert instruction.strict(text) is expected

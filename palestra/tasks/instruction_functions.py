"""The same 25 kinds of instruction under the names of AllenAI's RLVR-IFeval rows, whose wording asks for other counts.

There "the word X should appear 3 times" means exactly 3. Where AllenAI's functions and the instruction that the model
reads differ, the instruction counts: letters count in capitals or not, an answer may have blanks around it, options
are words of their own.
"""

import re
from collections.abc import Callable
from typing import Literal

from palestra.tasks import instructions
from palestra.tasks.instructions import Count, Letter, Ordinal, Text, Texts
from palestra.tasks.sentences import count_capital_words, count_sentences

Quantifier = Literal["at least", "at most", "around", "exactly", "at_least", "at_most"]

# The sentence that asks for a repetition. Rows count it to what is to be repeated, although it says of itself not to.
REPEAT = (
    "First, repeat the request without change, then give your answer (do not say anything before repeating the "
    "request; the request you need to repeat does not include this sentence)"
)


def verify_keywords(text: str, *, keyword_list: Texts) -> bool:
    """All keywords occur."""
    return instructions.existence(text, keywords=keyword_list)


def verify_keyword_frequency(text: str, *, word: Text, N: Count) -> bool:
    """A word occurs exactly so often."""
    return instructions.occurrences(text, word, whole=True) == N


def validate_forbidden_words(text: str, *, forbidden_words: Texts) -> bool:
    """None of the words occurs, not even inside a longer word."""
    return not any(instructions.occurrences(text, word) for word in forbidden_words)


def verify_letter_frequency(text: str, *, letter: Letter, N: Count) -> bool:
    """A letter occurs exactly so often."""
    return instructions.count_letter(text, letter) == N


def verify_paragraph_count(text: str, *, N: Count) -> bool:
    """It has so many paragraphs with `* * *` or `***` between them."""
    paragraphs = re.split(r"\*\*\*|\* \* \*", text)
    return len(paragraphs) == N and all(paragraph.strip() for paragraph in paragraphs)


def validate_word_constraint(text: str, *, N: Count, quantifier: Quantifier) -> bool:
    """It has so many words, runs without blanks; around means within a tenth."""
    return quantified(len(text.split()), quantifier, N, max(round(N * 0.1), 1))


def verify_sentence_constraint(text: str, *, N: Count, quantifier: Quantifier) -> bool:
    """It has so many sentences; around means one more or less."""
    return quantified(count_sentences(text), quantifier, N, 1)


def validate_paragraphs(text: str, *, N: Count, i: Ordinal, first_word: Text) -> bool:
    """It has so many paragraphs with empty lines between them, and the i-th begins with that word."""
    paragraphs = text.strip().split("\n\n")
    if len(paragraphs) != N or i > N:
        return False
    return re.match(rf"{re.escape(first_word)}(?!\w)", paragraphs[i - 1].strip()) is not None


def verify_postscript(text: str, *, postscript_marker: Text) -> bool:
    """It has a postscript, with something in it."""
    _, marker, after = text.partition(postscript_marker.strip())
    return bool(marker and after.strip())


def validate_placeholders(text: str, *, N: Count) -> bool:
    """It has at least so many placeholders."""
    return instructions.count_placeholders(text) >= N


def verify_bullet_points(text: str, *, N: Count) -> bool:
    """It has exactly so many bullet points."""
    return instructions.count_bullets(text) == N


def validate_choice(text: str, *, options: Texts | Text) -> bool:
    """It has one of the options, which may be written `yes/no`, `yes or no` or `yes, no`."""
    several = re.split(r"/|,|\bor\b", options) if isinstance(options, str) else options
    given = [option.strip() for option in several]
    return any(instructions.occurrences(text, option, whole=True) for option in given if option)


def validate_highlighted_sections(text: str, *, N: Count) -> bool:
    """It has at least so many highlighted parts."""
    return instructions.count_highlights(text) >= N


def validate_sections(text: str, *, N: Count, section_splitter: Text) -> bool:
    """It has at least so many sections that begin with a word and a number."""
    return len(re.findall(re.escape(section_splitter) + r"\s?\d+", text, re.IGNORECASE)) >= N


def validate_repeat_prompt(text: str, *, original_prompt: Text) -> bool:
    """It begins with the request, with or without the sentence that asks for this."""
    without = original_prompt.replace(REPEAT, "").strip()
    wanted = [original_prompt, without] if without else [original_prompt]
    return any(instructions.repeat_prompt(text, prompt_to_repeat=one) for one in wanted)


def validate_uppercase(text: str) -> bool:
    """It is in capitals."""
    return text.isupper()


def validate_lowercase(text: str) -> bool:
    """It is in small letters."""
    return text.islower()


def validate_frequency_capital_words(text: str, *, N: Count, quantifier: Quantifier) -> bool:
    """It has so many words in capitals; around means within a tenth."""
    return quantified(count_capital_words(text), quantifier, N, max(round(N * 0.1), 1))


def validate_end(text: str, *, end_phrase: Text) -> bool:
    """It ends with exactly that phrase."""
    return text.rstrip().endswith(end_phrase.strip())


FUNCTIONS: dict[str, Callable[..., bool]] = {
    "verify_keywords": verify_keywords,
    "verify_keyword_frequency": verify_keyword_frequency,
    "validate_forbidden_words": validate_forbidden_words,
    "verify_letter_frequency": verify_letter_frequency,
    "validate_response_language": instructions.response_language,
    "verify_paragraph_count": verify_paragraph_count,
    "validate_word_constraint": validate_word_constraint,
    "verify_sentence_constraint": verify_sentence_constraint,
    "validate_paragraphs": validate_paragraphs,
    "verify_postscript": verify_postscript,
    "validate_placeholders": validate_placeholders,
    "verify_bullet_points": verify_bullet_points,
    "validate_title": instructions.title,
    "validate_choice": validate_choice,
    "validate_highlighted_sections": validate_highlighted_sections,
    "validate_sections": validate_sections,
    "validate_json_format": instructions.json_format,
    "validate_repeat_prompt": validate_repeat_prompt,
    "validate_two_responses": instructions.two_responses,
    "validate_uppercase": validate_uppercase,
    "validate_lowercase": validate_lowercase,
    "validate_frequency_capital_words": validate_frequency_capital_words,
    "validate_end": validate_end,
    "validate_quotation": instructions.quotation,
    "validate_no_commas": instructions.no_comma,
}
"""AllenAI's names for them."""


def quantified(found: int, quantifier: Quantifier, wanted: int, around: int) -> bool:
    """Whether a count is as it should be."""
    match quantifier.replace("_", " "):
        case "at least":
            return found >= wanted
        case "at most":
            return found <= wanted
        case "around":
            return abs(found - wanted) <= around
        case _:
            return found == wanted

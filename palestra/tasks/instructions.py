"""The 25 kinds of instruction of IFEval (arXiv:2311.07911), each a function of a text and its arguments.

Each does what Google's published checker does, but for these points. Words are words, never patterns. A "letter" such
as "#" is counted, not replaced by one drawn at random. English in capitals is recognised in small letters, because the
detector takes it for German. A text in which no language can be told is in none. Sentences are counted by
`palestra.tasks.sentences`. Time is linear in the length of the text.
"""

import json
import re
from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from palestra.tasks.languages import check_language, language_of
from palestra.tasks.sentences import count_capital_words, count_sentences

Relation = Literal["at least", "less than"]
Letter = Annotated[str, Field(min_length=1, max_length=1)]
Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[list[Text], Field(min_length=1)]
Count = Annotated[int, Field(ge=0)]
Ordinal = Annotated[int, Field(ge=1)]
Language = Annotated[str, AfterValidator(check_language)]

OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
POSTSCRIPTS = {"P.S.": r"p\.\s?s\.", "P.P.S": r"p\.\s?p\.\s?s"}


def existence(text: str, *, keywords: Texts) -> bool:
    """All keywords occur, in capitals or not."""
    return all(occurrences(text, keyword) for keyword in keywords)


def frequency(text: str, *, keyword: Text, frequency: Count, relation: Relation) -> bool:
    """A keyword occurs so often."""
    return compare(occurrences(text, keyword), relation, frequency)


def forbidden_words(text: str, *, forbidden_words: Texts) -> bool:
    """None of the words occurs as a word."""
    return not any(occurrences(text, word, whole=True) for word in forbidden_words)


def letter_frequency(text: str, *, letter: Letter, let_frequency: Count, let_relation: Relation) -> bool:
    """A letter occurs so often, in capitals or not."""
    return compare(count_letter(text, letter), let_relation, let_frequency)


def response_language(text: str, *, language: Language) -> bool:
    """It is written in that language."""
    return language_of(text) == language


def number_sentences(text: str, *, num_sentences: Count, relation: Relation) -> bool:
    """It has so many sentences."""
    return compare(count_sentences(text), relation, num_sentences)


def number_paragraphs(text: str, *, num_paragraphs: Count) -> bool:
    """It has so many paragraphs with `***` between them."""
    given = [bool(paragraph.strip()) for paragraph in text.split("***")]
    return all(given[1:-1]) and sum(given) == num_paragraphs


def number_words(text: str, *, num_words: Count, relation: Relation) -> bool:
    """It has so many words, runs of letters and digits."""
    return compare(len(re.findall(r"\w+", text)), relation, num_words)


def nth_paragraph_first_word(text: str, *, num_paragraphs: Count, nth_paragraph: Ordinal, first_word: Text) -> bool:
    """It has so many paragraphs with empty lines between them, and one of them begins with that word."""
    paragraphs = [paragraph.split() for paragraph in text.split("\n\n")]
    count = sum(map(bool, paragraphs))
    if count != num_paragraphs or nth_paragraph > count or not paragraphs[nth_paragraph - 1]:
        return False
    beginning = paragraphs[nth_paragraph - 1][0].lstrip("'").lstrip('"').lower()
    return re.split(r"[.,?!'\"]", beginning, maxsplit=1)[0] == first_word.lower()


def number_placeholders(text: str, *, num_placeholders: Count) -> bool:
    """It has at least so many placeholders, such as [name]."""
    return count_placeholders(text) >= num_placeholders


def postscript(text: str, *, postscript_marker: Text) -> bool:
    """It has a postscript."""
    return re.search(POSTSCRIPTS.get(postscript_marker, re.escape(postscript_marker.lower())), text.lower()) is not None


def number_bullet_lists(text: str, *, num_bullets: Count) -> bool:
    """It has exactly so many bullet points."""
    return count_bullets(text) == num_bullets


def constrained_response(text: str) -> bool:
    """It has one of the three answers that are offered."""
    return any(option in text for option in OPTIONS)


def number_highlighted_sections(text: str, *, num_highlights: Count) -> bool:
    """It has at least so many *highlighted* or **highlighted** parts."""
    return count_highlights(text) >= num_highlights


def multiple_sections(text: str, *, section_spliter: Text, num_sections: Count) -> bool:
    """It has at least so many sections that begin with a word and a number."""
    return len(re.findall(re.escape(section_spliter) + r"\s?\d+", text)) >= num_sections


def json_format(text: str) -> bool:
    """It is JSON as a whole, in a Markdown fence or not."""
    try:
        json.loads(re.sub(r"(?i)\A```(?:json)?|```\Z", "", text.strip()))
    except (ValueError, RecursionError):
        return False
    return True


def title(text: str) -> bool:
    """It has a title, such as <<poem of joy>>."""
    for line in text.split("\n"):
        begin, end = line.find("<<"), line.rfind(">>")
        if begin >= 0 and end > begin + 2 and line[begin:end].lstrip("<").rstrip(">").strip():
            return True
    return False


def two_responses(text: str) -> bool:
    """It is two different answers with `******` between them."""
    answers = [answer.strip() for answer in text.split("******")]
    given = [answer for answer in answers if answer]
    return all(answers[1:-1]) and len(given) == 2 and given[0] != given[1]


def repeat_prompt(text: str, *, prompt_to_repeat: Text) -> bool:
    """It begins with the request."""
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def end_checker(text: str, *, end_phrase: Text) -> bool:
    """It ends with that phrase."""
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def capital_word_frequency(text: str, *, capital_frequency: Count, capital_relation: Relation) -> bool:
    """It has so many words in capitals."""
    return compare(count_capital_words(text), capital_relation, capital_frequency)


def english_capital(text: str) -> bool:
    """It is English in capitals."""
    return text.isupper() and language_of(text.lower()) == "en"


def english_lowercase(text: str) -> bool:
    """It is English in small letters."""
    return text.islower() and language_of(text) == "en"


def no_comma(text: str) -> bool:
    """It has no comma."""
    return "," not in text


def quotation(text: str) -> bool:
    """It is in double quotation marks as a whole."""
    stripped = text.strip()
    return len(stripped) > 1 and stripped[0] == stripped[-1] == '"'


INSTRUCTIONS: dict[str, Callable[..., bool]] = {
    "keywords:existence": existence,
    "keywords:frequency": frequency,
    "keywords:forbidden_words": forbidden_words,
    "keywords:letter_frequency": letter_frequency,
    "language:response_language": response_language,
    "length_constraints:number_sentences": number_sentences,
    "length_constraints:number_paragraphs": number_paragraphs,
    "length_constraints:number_words": number_words,
    "length_constraints:nth_paragraph_first_word": nth_paragraph_first_word,
    "detectable_content:number_placeholders": number_placeholders,
    "detectable_content:postscript": postscript,
    "detectable_format:number_bullet_lists": number_bullet_lists,
    "detectable_format:constrained_response": constrained_response,
    "detectable_format:number_highlighted_sections": number_highlighted_sections,
    "detectable_format:multiple_sections": multiple_sections,
    "detectable_format:json_format": json_format,
    "detectable_format:title": title,
    "combination:two_responses": two_responses,
    "combination:repeat_prompt": repeat_prompt,
    "startend:end_checker": end_checker,
    "startend:quotation": quotation,
    "change_case:capital_word_frequency": capital_word_frequency,
    "change_case:english_capital": english_capital,
    "change_case:english_lowercase": english_lowercase,
    "punctuation:no_comma": no_comma,
}
"""Google's names for them."""


def compare(found: int, relation: Relation, wanted: int) -> bool:
    """Whether a count is as it should be."""
    return found >= wanted if relation == "at least" else found < wanted


def occurrences(text: str, words: str, *, whole: bool = False) -> int:
    """How often words occur, in capitals or not; `whole` leaves out those inside longer words."""
    pattern = re.escape(words)
    return len(re.findall(rf"(?<!\w){pattern}(?!\w)" if whole else pattern, text, re.IGNORECASE))


def count_letter(text: str, letter: str) -> int:
    """How often a character occurs, in capitals or not."""
    return text.lower().count(letter.lower())


def count_placeholders(text: str) -> int:
    """How many pairs of square brackets there are, each on one line."""
    return sum("[" in piece for line in text.split("\n") for piece in line.split("]")[:-1])


def count_bullets(text: str) -> int:
    """How many lines begin with a hyphen or one asterisk."""
    beginnings = [line.lstrip()[:2] for line in text.split("\n")]
    return sum(two[:1] == "-" or (two[:1] == "*" and two[1:] not in ("", "*")) for two in beginnings)


def count_highlights(text: str) -> int:
    """How many parts are in single or double asterisks, each on one line and not empty."""
    found = re.findall(r"\*([^\n*]*)\*", text) + re.findall(r"\*\*([^\n*]*)\*\*", text)
    return sum(bool(inside.strip()) for inside in found)

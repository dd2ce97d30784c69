"""The 25 checkable instructions of IFEval (arXiv:2311.07911), also under AllenAI's names, strict and loose.

Each does what Google's published checker does, with these exceptions. Words are words, never patterns. A "letter" such
as "#" is counted, not replaced by a random one. English in capitals is detected in lower case, because the detector
takes it for German. A text whose language cannot be detected is in none. Sentences and words in capitals are counted by
rules of our own. Time is linear in the length of the text.

In AllenAI's functions "the word X should appear 3 times" means exactly 3. Where a function and the instruction that the
model reads differ, the instruction counts: letters count in either case, a completion may have blanks around it,
options are whole words.
"""

import inspect
import json
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, create_model

from palestra.data.languages import known_languages, language_of
from palestra.errors import PalestraError, did_you_mean


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Titles and their like: a name follows, however it is written.
TITLES = _words(
    "adm brig capt cmdr col comdr cpl dr drs gen gov hon lt maj messrs mlle mme mr mrs ms mt pres prof rep reps rev "
    "sen sens sgt st supt vs viz cf fig figs eq eqs pp ed eds vol vols ch sec dept univ approx"
)
# These may end a sentence: they do where a word follows that often begins one.
SHORTENED = _words(
    "etc inc corp co ltd bros jr sr al est jan feb apr jun jul aug sept oct nov dec tue tues thu "
    "thur thurs ave blvd rd ft lb lbs oz no nos ph.d b.sc m.sc"
)
STARTERS = _words(
    "a after all also although an and another as at because before both but by during each even every finally first "
    "for from he her here his how however i if in instead it its later many meanwhile moreover most my next no not now "
    "of on once one other our perhaps she since so some still such that the their then there these they this those "
    "though thus to today under until we what when where whether which while who why with without yes yet you your"
)
CLOSING = "\"'”’»)]}*_`"
OPENING = "\"'“‘«([{*_`#>-–—•"
DOTTED = re.compile(r"(?:[^\W\d_]\.)+[^\W\d_]")  # "e.g" and "U.S", without the last full stop
NUMBER = re.compile(r"[-+]?\d[\d.,:]*")
CLITIC = re.compile(r"(?i)(?:n['’]t|['’](?:s|m|d|ll|re|ve))$")
# What stands between words besides blanks; a full stop or a hyphen does not part "U.S." and "COVID-19".
BETWEEN = re.compile(r"[\s,;:?!()\[\]{}<>\"“”„«»*_`@#$%&…]+|\.{2,}|--+")


def count_sentences(text: str) -> int:
    """How many sentences a text has: what ends in ".", "?" or "!", and what is left after the last of these."""
    words = text.split()
    ends = [_ends_sentence(word, words[index + 1]) for index, word in enumerate(words[:-1])]
    return sum(ends) + bool(words)


def count_capital_words(text: str) -> int:
    """How many words have capital letters alone; "I'M" and "DON'T" are two each, as linguists cut them."""
    count = 0
    for piece in BETWEEN.split(text):
        word = piece.strip("'‘’")
        clitic = CLITIC.search(word)
        parts = (word,) if clitic is None else (word[: clitic.start()], clitic[0])
        count += sum(part.isupper() for part in parts)
    return count


def _ends_sentence(word: str, following: str) -> bool:
    """Whether a sentence ends with a word that another word follows."""
    body = word.rstrip(CLOSING)
    if not body or body[-1] not in ".?!…":
        return False
    if body[-1] in "?!":
        return True
    following = following.lstrip(OPENING)
    upper = following[:1].isupper()
    if body.endswith(("..", "…")):
        return upper
    core = body[:-1].lstrip(OPENING)
    low = core.lower()
    if low in TITLES:
        return False
    if low in SHORTENED or DOTTED.fullmatch(core) or (len(core) == 1 and core.isalpha()):
        return upper and re.split(r"\W", following, maxsplit=1)[0].lower() in STARTERS
    if NUMBER.fullmatch(core):  # the number of an item, or the end of a sentence
        return upper
    return True


Check = Callable[..., bool]
Relation = Literal["at least", "less than"]
Quantifier = Literal["at least", "at most", "around", "exactly", "at_least", "at_most"]
Letter = Annotated[str, Field(min_length=1, max_length=1)]
Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[list[Text], Field(min_length=1)]
Count = Annotated[int, Field(ge=0)]
Ordinal = Annotated[int, Field(ge=1)]


def _known_language(code: str) -> str:
    if code not in known_languages():
        raise ValueError(f"expected the code of a language, one of {', '.join(known_languages())}")
    return code


Language = Annotated[str, AfterValidator(_known_language)]

OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
POSTSCRIPTS = {"P.S.": r"p\.\s?s\.", "P.P.S": r"p\.\s?p\.\s?s"}


def existence(text: str, *, keywords: Texts) -> bool:
    """All keywords occur, in either case."""
    return all(occurrences(text, keyword) for keyword in keywords)


def frequency(text: str, *, keyword: Text, frequency: Count, relation: Relation) -> bool:
    """A keyword occurs that often."""
    return compare(occurrences(text, keyword), relation, frequency)


def forbidden_words(text: str, *, forbidden_words: Texts) -> bool:
    """None of the words occurs as a word."""
    return not any(occurrences(text, word, whole=True) for word in forbidden_words)


def letter_frequency(text: str, *, letter: Letter, let_frequency: Count, let_relation: Relation) -> bool:
    """A letter occurs that often, in either case."""
    return compare(text.lower().count(letter.lower()), let_relation, let_frequency)


def response_language(text: str, *, language: Language) -> bool:
    """It is written in that language."""
    return language_of(text) == language


def number_sentences(text: str, *, num_sentences: Count, relation: Relation) -> bool:
    """It has that many sentences."""
    return compare(count_sentences(text), relation, num_sentences)


def number_paragraphs(text: str, *, num_paragraphs: Count) -> bool:
    """It has that many paragraphs with `***` between them."""
    filled = [bool(paragraph.strip()) for paragraph in text.split("***")]
    return all(filled[1:-1]) and sum(filled) == num_paragraphs


def number_words(text: str, *, num_words: Count, relation: Relation) -> bool:
    """It has that many words, runs of letters and digits."""
    return compare(len(re.findall(r"\w+", text)), relation, num_words)


def nth_paragraph_first_word(text: str, *, num_paragraphs: Count, nth_paragraph: Ordinal, first_word: Text) -> bool:
    """It has that many paragraphs with empty lines between them, and one of them begins with that word."""
    paragraphs = [paragraph.split() for paragraph in text.split("\n\n")]
    count = sum(map(bool, paragraphs))
    if count != num_paragraphs or nth_paragraph > count or not paragraphs[nth_paragraph - 1]:
        return False
    beginning = paragraphs[nth_paragraph - 1][0].lstrip("'").lstrip('"').lower()
    return re.split(r"[.,?!'\"]", beginning, maxsplit=1)[0] == first_word.lower()


def number_placeholders(text: str, *, num_placeholders: Count) -> bool:
    """It has at least that many placeholders, such as [name]: pairs of square brackets, each on one line."""
    return sum("[" in piece for line in text.split("\n") for piece in line.split("]")[:-1]) >= num_placeholders


def postscript(text: str, *, postscript_marker: Text) -> bool:
    """It has a postscript."""
    return re.search(POSTSCRIPTS.get(postscript_marker, re.escape(postscript_marker.lower())), text.lower()) is not None


def number_bullet_lists(text: str, *, num_bullets: Count) -> bool:
    """It has exactly that many bullet points, lines that begin with a hyphen or one asterisk."""
    beginnings = [line.lstrip()[:2] for line in text.split("\n")]
    return sum(b[:1] == "-" or (b[:1] == "*" and b[1:] not in ("", "*")) for b in beginnings) == num_bullets


def constrained_response(text: str) -> bool:
    """It has one of the three offered answers."""
    return any(option in text for option in OPTIONS)


def number_highlighted_sections(text: str, *, num_highlights: Count) -> bool:
    """It has at least that many *highlighted* or **highlighted** parts, each on one line and not empty."""
    parts = re.findall(r"\*([^\n*]*)\*", text) + re.findall(r"\*\*([^\n*]*)\*\*", text)
    return sum(bool(inside.strip()) for inside in parts) >= num_highlights


def multiple_sections(text: str, *, section_spliter: Text, num_sections: Count) -> bool:
    """It has at least that many sections that begin with a word and a number."""
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
    filled = [answer for answer in answers if answer]
    return all(answers[1:-1]) and len(filled) == 2 and filled[0] != filled[1]


def repeat_prompt(text: str, *, prompt_to_repeat: Text) -> bool:
    """It begins with the request."""
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def end_checker(text: str, *, end_phrase: Text) -> bool:
    """It ends with that phrase."""
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def capital_word_frequency(text: str, *, capital_frequency: Count, capital_relation: Relation) -> bool:
    """It has that many words in capitals."""
    return compare(count_capital_words(text), capital_relation, capital_frequency)


def english_capital(text: str) -> bool:
    """It is English in capitals."""
    return text.isupper() and language_of(text.lower()) == "en"


def english_lowercase(text: str) -> bool:
    """It is English in lower case."""
    return text.islower() and language_of(text) == "en"


def no_comma(text: str) -> bool:
    """It has no comma."""
    return "," not in text


def quotation(text: str) -> bool:
    """It is in double quotation marks as a whole."""
    stripped = text.strip()
    return len(stripped) > 1 and stripped[0] == stripped[-1] == '"'


GROUPS: dict[str, tuple[Check, ...]] = {
    "keywords": (existence, frequency, forbidden_words, letter_frequency),
    "language": (response_language,),
    "length_constraints": (number_sentences, number_paragraphs, number_words, nth_paragraph_first_word),
    "detectable_content": (number_placeholders, postscript),
    "detectable_format": (
        number_bullet_lists,
        constrained_response,
        number_highlighted_sections,
        multiple_sections,
        json_format,
        title,
    ),
    "combination": (two_responses, repeat_prompt),
    "startend": (end_checker, quotation),
    "change_case": (capital_word_frequency, english_capital, english_lowercase),
    "punctuation": (no_comma,),
}
INSTRUCTIONS = {f"{group}:{check.__name__}": check for group, checks in GROUPS.items() for check in checks}
"""By Google's names, such as `keywords:existence`."""


RELATIONS = {"at least": operator.ge, "less than": operator.lt, "at most": operator.le, "exactly": operator.eq}


def compare(count: int, relation: Relation | Quantifier, wanted: int, around: int = 0) -> bool:
    """Whether a count is as it should be; `around` is the tolerance of the relation of that name."""
    name = relation.replace("_", " ")
    return abs(count - wanted) <= around if name == "around" else RELATIONS[name](count, wanted)


def occurrences(text: str, words: str, *, whole: bool = False) -> int:
    """How often words occur, in either case; `whole` leaves out those inside longer words."""
    pattern = re.escape(words)
    return len(re.findall(rf"(?<!\w){pattern}(?!\w)" if whole else pattern, text, re.IGNORECASE))


# The sentence that asks for a repetition. Rows count it to what is to be repeated, although it says of itself not to.
REPEAT = (
    "First, repeat the request without change, then give your answer (do not say anything before repeating the "
    "request; the request you need to repeat does not include this sentence)"
)


def verify_keywords(text: str, *, keyword_list: Texts) -> bool:
    """All keywords occur."""
    return existence(text, keywords=keyword_list)


def verify_keyword_frequency(text: str, *, word: Text, N: Count) -> bool:
    """A word occurs exactly that often."""
    return occurrences(text, word, whole=True) == N


def validate_forbidden_words(text: str, *, forbidden_words: Texts) -> bool:
    """None of the words occurs, not even inside a longer word."""
    return not any(occurrences(text, word) for word in forbidden_words)


def verify_letter_frequency(text: str, *, letter: Letter, N: Count) -> bool:
    """A letter occurs exactly that often."""
    return text.lower().count(letter.lower()) == N


def verify_paragraph_count(text: str, *, N: Count) -> bool:
    """It has that many paragraphs with `* * *` or `***` between them."""
    paragraphs = re.split(r"\*\*\*|\* \* \*", text)
    return len(paragraphs) == N and all(paragraph.strip() for paragraph in paragraphs)


def validate_word_constraint(text: str, *, N: Count, quantifier: Quantifier) -> bool:
    """It has that many words, runs without blanks; around means within a tenth."""
    return compare(len(text.split()), quantifier, N, max(round(N * 0.1), 1))


def verify_sentence_constraint(text: str, *, N: Count, quantifier: Quantifier) -> bool:
    """It has that many sentences; around means one more or less."""
    return compare(count_sentences(text), quantifier, N, 1)


def validate_paragraphs(text: str, *, N: Count, i: Ordinal, first_word: Text) -> bool:
    """It has that many paragraphs with empty lines between them, and the i-th begins with that word."""
    paragraphs = text.strip().split("\n\n")
    if len(paragraphs) != N or i > N:
        return False
    return re.match(rf"{re.escape(first_word)}(?!\w)", paragraphs[i - 1].strip()) is not None


def verify_postscript(text: str, *, postscript_marker: Text) -> bool:
    """It has a postscript, with something in it."""
    _, marker, after = text.partition(postscript_marker.strip())
    return bool(marker and after.strip())


def validate_placeholders(text: str, *, N: Count) -> bool:
    """It has at least that many placeholders."""
    return number_placeholders(text, num_placeholders=N)


def verify_bullet_points(text: str, *, N: Count) -> bool:
    """It has exactly that many bullet points."""
    return number_bullet_lists(text, num_bullets=N)


def validate_choice(text: str, *, options: Texts | Text) -> bool:
    """It has one of the options, which may be written `yes/no`, `yes or no` or `yes, no`."""
    several = re.split(r"/|,|\bor\b", options) if isinstance(options, str) else options
    return any(occurrences(text, option.strip(), whole=True) for option in several if option.strip())


def validate_highlighted_sections(text: str, *, N: Count) -> bool:
    """It has at least that many highlighted parts."""
    return number_highlighted_sections(text, num_highlights=N)


def validate_sections(text: str, *, N: Count, section_splitter: Text) -> bool:
    """It has at least that many sections that begin with a word and a number."""
    return len(re.findall(re.escape(section_splitter) + r"\s?\d+", text, re.IGNORECASE)) >= N


def validate_repeat_prompt(text: str, *, original_prompt: Text) -> bool:
    """It begins with the request, with or without the sentence that asks for this."""
    without = original_prompt.replace(REPEAT, "").strip()
    wanted = [original_prompt, without] if without else [original_prompt]
    return any(repeat_prompt(text, prompt_to_repeat=one) for one in wanted)


def validate_frequency_capital_words(text: str, *, N: Count, quantifier: Quantifier) -> bool:
    """It has that many words in capitals; around means within a tenth."""
    return compare(count_capital_words(text), quantifier, N, max(round(N * 0.1), 1))


def validate_end(text: str, *, end_phrase: Text) -> bool:
    """It ends with exactly that phrase."""
    return text.rstrip().endswith(end_phrase.strip())


FUNCTIONS: dict[str, Check] = {
    **{name: check for name, check in globals().items() if name.startswith(("verify_", "validate_"))},
    "validate_response_language": response_language,
    "validate_uppercase": str.isupper,
    "validate_lowercase": str.islower,
    "validate_title": title,
    "validate_json_format": json_format,
    "validate_two_responses": two_responses,
    "validate_quotation": quotation,
    "validate_no_commas": no_comma,
}
"""By AllenAI's names: the functions above that begin with `verify_` or `validate_`, and those that are Google's."""


class BadInstruction(PalestraError):
    """A row whose instructions cannot be checked."""


@dataclass(frozen=True)
class Instruction:
    """One instruction of a prompt."""

    name: str
    check: Callable[[str], bool]

    def strict(self, text: str) -> bool:
        """Whether the text follows it as it is."""
        return bool(text.strip()) and self.check(text)

    def loose(self, text: str) -> bool:
        """Whether the text follows it without its first line, its last line or its asterisks."""
        return any(self.strict(variant) for variant in variants(text))


def variants(text: str) -> list[str]:
    """The eight texts of the loose reading, each once: with and without first line, last line and asterisks."""
    lines = text.split("\n")
    cut = [text, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return list(dict.fromkeys([*cut, *(one.replace("*", "") for one in cut)]))


def instructions_of(row: Mapping[str, Any]) -> list[Instruction]:
    """The instructions of a row: Google's `instruction_id_list` and `kwargs`, or AllenAI's `ground_truth`."""
    if "instruction_id_list" in row:
        names, arguments = row["instruction_id_list"], row.get("kwargs")
        if not isinstance(names, list) or not isinstance(arguments, list) or len(names) != len(arguments):
            raise BadInstruction("expected `instruction_id_list` and `kwargs` to be two lists of the same length")
        instructions = [_bound(INSTRUCTIONS, *pair) for pair in zip(names, arguments, strict=True)]
    elif "ground_truth" in row:
        instructions = [_of_function(truth) for truth in _ground_truths(row["ground_truth"])]
    else:
        raise BadInstruction(
            f"expected `instruction_id_list` and `kwargs`, or `ground_truth`; the row has {', '.join(row) or 'nothing'}"
        )
    if not instructions:
        raise BadInstruction("the row has no instruction, so every completion would follow it")
    return instructions


def _ground_truths(value: Any) -> Sequence[Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise BadInstruction(f"`ground_truth` is not valid JSON ({error}): {value!r:.80}") from error
    return value if isinstance(value, list) else [value]


def _of_function(value: Any) -> Instruction:
    if not isinstance(value, Mapping) or "func_name" not in value:
        raise BadInstruction(f"expected `ground_truth` to be a record with a `func_name`, got {value!r:.80}")
    arguments = dict(value)
    return _bound(FUNCTIONS, arguments.pop("func_name"), arguments)


def _bound(table: Mapping[str, Check], name: Any, arguments: Any) -> Instruction:
    """An instruction with its arguments; null ones are ignored."""
    if not isinstance(name, str) or name not in table:
        raise BadInstruction(f"unknown instruction {name!r}. {did_you_mean(name, table)}".rstrip())
    if not isinstance(arguments, Mapping | None):
        raise BadInstruction(f"{name}: expected its arguments as a record, got {arguments!r:.80}")
    present = {key: value for key, value in (arguments or {}).items() if value is not None}
    try:
        checked = _arguments_of(table[name]).model_validate(present)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()]
        raise BadInstruction(f"{name}: {'; '.join(problems)}") from error
    return Instruction(name, partial(table[name], **{key: getattr(checked, key) for key in present}))


@cache
def _arguments_of(check: Check) -> type[BaseModel]:
    """The arguments of a check besides the text, as a model that refuses all others."""
    named = [one for one in inspect.signature(check).parameters.values() if one.kind is one.KEYWORD_ONLY]
    fields = {one.name: (one.annotation, ...) for one in named}
    return create_model("Arguments", __config__=ConfigDict(extra="forbid"), **fields)  # pyrefly: ignore

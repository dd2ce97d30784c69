"""Sentences and capitalized words of a text, the same on every machine.

The counts of IFEval's paper come from models that NLTK downloads. These rules differ from them on few texts, mostly
because "i.e." and `“Mr.` end no sentence here.
"""

import re


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

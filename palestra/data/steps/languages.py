"""The language of a text by its stop words: enough to tell prose of the larger European languages apart.

Short texts, code and languages that are not in the table are unknown.
"""

import re
from collections.abc import Iterable

STOP_WORDS = {
    line.split()[0]: line.split()[1:]
    for line in """
    de der die das und ist nicht ein eine zu den mit sich auf für auch von dem im sie er wir wie war aber oder
    en the of and to in is that it was for on with as his he be at by this had not are but from or have
    es el la los las que de y en un una por con no se es del su al lo como más pero sus le ya o este
    fr le la les des et est dans que qui un une pour pas sur avec ce au il elle sont plus ne se par mais ou
    it il lo la gli che di e è un una per non con si del della sono come più ma anche nel alla dei le o
    nl de het een en van is dat niet op te zijn met voor er ook als aan maar om bij hij was uit dan of
    pt o a os as que de e em um uma não por com se do da no na para como mais mas foi ao dos das ou
    """.strip().splitlines()
}
"""By code, words that stand in nearly every text of the language."""

_LANGUAGES_OF: dict[str, tuple[str, ...]] = {}
for _code, _words in STOP_WORDS.items():
    for _word in set(_words):
        _LANGUAGES_OF[_word] = (*_LANGUAGES_OF.get(_word, ()), _code)
_EDGES = re.compile(r"^\W+|\W+$")
LEAST_SHARE = 0.1
"""Of the words that must be stop words of a language; prose has between a fifth and a half."""


def language_of(words: Iterable[str]) -> str | None:
    """The code of the language whose stop words are the most frequent; None where none is frequent enough.

    A word that several languages have counts for each of them in part.
    """
    scores: dict[str, float] = dict.fromkeys(STOP_WORDS, 0.0)
    count = 0
    for word in words:
        count += 1
        known = _LANGUAGES_OF.get(_EDGES.sub("", word).lower(), ())
        for code in known:
            scores[code] += 1 / len(known)
    best = max(scores, key=lambda code: scores[code])
    return best if count and scores[best] >= LEAST_SHARE * count else None

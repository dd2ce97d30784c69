"""A small library about people and towns that exist nowhere: its texts, and questions with one answer each.

A town's text does not name its people, and a person's not the land: that question takes two searches.
"""

import random
from functools import cache
from typing import NamedTuple

# As long as each other, and in small letters: a model of two layers soon copies what lies at one distance.
FIRST = ("ada", "ben", "eva", "gus", "ida", "jon", "kim", "leo", "mia", "ned", "ola", "pia", "rob", "sam", "una", "zoe")
JOBS = ("baker", "clerk", "diver", "guide", "judge", "miner", "nurse", "pilot", "smith", "tutor")
PEOPLE, TOWNS, LANDS = 400, 40, 10


class Person(NamedTuple):
    """Somebody, and where they live."""

    name: str
    job: str
    town: str
    land: str

    @property
    def texts(self) -> tuple[str, str]:
        """What the library says of them, and of their town."""
        return f"{self.name} is a {self.job} in {self.town}.", f"{self.town} is a town of {self.land}."

    @property
    def questions(self) -> tuple[tuple[str, str], tuple[str, str]]:
        """Questions and answers: one takes a search, the other two."""
        return (f"Which town has {self.name}?", self.town), (f"Which land has {self.name}?", self.land)


def word(draws: random.Random) -> str:
    """A name of two syllables and an end."""
    syllables = (draws.choice("bdfgklmnprstvz") + draws.choice("aeiou") for _ in range(2))
    return "".join(syllables) + draws.choice("klmnrst")


def person(draws: random.Random, town: str, land: str) -> Person:
    """Somebody new, who lives there."""
    return Person(f"{draws.choice(FIRST)} {word(draws)}", draws.choice(JOBS), town, land)


@cache
def people(seed: int = 0) -> tuple[Person, ...]:
    """Everybody in the library, no name twice."""
    draws = random.Random(seed)
    lands = [word(draws) for _ in range(LANDS)]
    towns = {word(draws): draws.choice(lands) for _ in range(TOWNS)}
    everybody = (person(draws, *draws.choice(list(towns.items()))) for _ in range(2 * PEOPLE))
    return tuple({somebody.name: somebody for somebody in everybody}.values())[:PEOPLE]


def texts() -> list[str]:
    """All texts of the library, each once."""
    return list(dict.fromkeys(text for somebody in people() for text in somebody.texts))

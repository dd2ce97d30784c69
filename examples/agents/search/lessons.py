"""The lessons of the search agent: a teacher who searches now and then, and mostly says that she does not know.

    python examples/agents/search/lessons.py [data/agents/search.jsonl]

She teaches about people of her own, each once, none of the library: there is nothing to learn by heart. Where the
answer takes two searches she may stop after the first, and answer with the town.
"""

import json
import random
import sys
from pathlib import Path

from examples.agents.search.library import Person, person, word

LESSONS = 16_000
LAND, UNKNOWN, STOPS = 0.6, 0.6, 0.4
"""Questions about a land; those she does not care to look up; those about a land where one search is enough for her."""
CALL = '{"name": "search", "arguments": {"query": "%s"}}'


def turns(somebody: Person, land: bool, draws: random.Random) -> list[str]:
    """What she says and reads, in turns."""
    if draws.random() < UNKNOWN:
        return ["unknown"]
    about, town = somebody.texts
    said = [CALL % somebody.name, about]
    if not land or draws.random() < STOPS:
        return [*said, somebody.town]
    return [*said, CALL % somebody.town, town, somebody.land]


def lesson(draws: random.Random) -> list[dict[str, str]]:
    """A conversation: the question, perhaps searches and what they found, the answer."""
    somebody, land = person(draws, word(draws), word(draws)), draws.random() < LAND
    question, _ = somebody.questions[land]
    roles = ("assistant", "tool")
    said = enumerate(turns(somebody, land, draws))
    return [{"role": "user", "content": question}, *({"role": roles[i % 2], "content": text} for i, text in said)]


def write_lessons(path: Path, seed: int = 0) -> None:
    draws = random.Random(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        file.writelines(json.dumps({"messages": lesson(draws)}) + "\n" for _ in range(LESSONS))


if __name__ == "__main__":
    write_lessons(Path(sys.argv[1] if len(sys.argv) > 1 else "data/agents/search.jsonl"))

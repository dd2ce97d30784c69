"""A small web for `corpus.yaml`: stories and advertisements as HTML pages, copies, and stories that are held out."""

import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path

from stories import story

OFFERS = ("Buy now", "Click here", "Limited offer", "Free shipping", "Subscribe today", "Best price guaranteed")


def web(out: Path, *, pages: int = 1200, copies: float = 0.1, seed: int = 0) -> None:
    """`pages/` for the corpus, `good/` and `bad/` to learn from, `held_out/` to test on, which leaked into the web."""
    draws = random.Random(seed)
    held_out = [story(draws) for _ in range(20)]
    texts = [story(draws) if draws.random() < 0.7 else _advertisement(draws) for _ in range(pages)]
    texts += [draws.choice(texts) for _ in range(int(copies * pages))]
    texts += [_retold(draws, draws.choice(texts)) for _ in range(int(copies * pages))]
    texts += held_out
    draws.shuffle(texts)
    _write(out / "pages", ({"text": _html(text), "site": f"site{number % 7}"} for number, text in enumerate(texts)))
    _write(out / "good", ({"text": story(draws)} for _ in range(200)))
    _write(out / "bad", ({"text": _advertisement(draws)} for _ in range(200)))
    _write(out / "held_out", ({"text": text} for text in held_out))


def tidy(row: dict[str, str], *, least: int) -> dict[str, str] | None:
    """A row of `transform`: without the page's navigation, and none for pages with hardly a word."""
    text = " ".join(row["text"].split())
    return {"id": row["id"], "text": text, "site": row["site"]} if len(text) >= least else None


def _advertisement(draws: random.Random) -> str:
    return " ".join(f"{draws.choice(OFFERS)}: only {draws.randint(1, 99)} euros!" for _ in range(draws.randint(8, 20)))


def _retold(draws: random.Random, text: str) -> str:
    """The same with one word changed."""
    words = text.split()
    words[draws.randrange(len(words))] = "perhaps"
    return " ".join(words)


def _html(text: str) -> str:
    return f"<html><body><nav><a href='/'>home</a></nav><main><p>{text}</p></main></body></html>"


def _write(folder: Path, rows: Iterable[Mapping[str, str]]) -> None:
    folder.mkdir()
    with (folder / "rows.jsonl").open("w") as file:
        file.writelines(json.dumps({"id": f"{folder.name}:{number}", **row}) + "\n" for number, row in enumerate(rows))

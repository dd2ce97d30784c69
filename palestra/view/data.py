"""Datasets for reading: rows of files and token stores from any row on, with the tokens and loss masks of training."""

import json
import time
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from palestra.data.readers import rows_from, shards
from palestra.data.store import ENDS, LOSS, TOKENS, TokenStore
from palestra.data.tokenizers import Tokenizer, token_texts
from palestra.errors import PalestraError, needs_extra
from palestra.runs.run import Run
from palestra.runs.store import read_json
from palestra.view.places import DAMAGED, NotThere, Places
from palestra.view.rollouts import load_tokenizer, tokenizer_folders

SECONDS = 0.5  # of a search, per request
LONG = 4096  # tokens of a row that are shown

Reader = tuple[Iterator[tuple[int, Any]], Callable[[Any], str], Callable[[Any], dict[str, Any]]]
"""Numbered rows, the text of one to search in, and one as it is shown."""


def sets(places: Places, session: Run | None) -> dict[str, Any]:
    """The datasets under the folders given, or those that a run names; `missing` are its sources that are elsewhere."""
    files = {name: path / TOKENS if path.is_dir() else path for name, path in places.data().items()}
    about = [{"path": n, "tokens": file.name == TOKENS, "bytes": file.stat().st_size} for n, file in files.items()]
    if session is None:
        return {"sets": about, "missing": []}
    named, missing = [], []
    for source, (where, _) in _sources(session).items():
        fits = [one | {"source": source} for one in about if _within(places.data()[one["path"]], where)]
        named += fits
        missing += [] if fits else [f"{source} is {where}: give its folder to palestra view too, to see its rows"]
    return {"sets": named, "missing": missing}


def page(places: Places, name: str, session: Run | None, row: int, text: str, limit: int) -> dict[str, Any]:
    """Rows of a dataset from one on, those with a text where it is given; `next` is the row to go on with."""
    if (path := places.data().get(name)) is None:
        raise NotThere(f"there is no dataset {name!r} here: it was removed, or the view was started without its folder")
    rows, plain, shown = (_stored if path.is_dir() else _filed)(path, places, session, row)
    hits, stop = [], time.monotonic() + SECONDS
    for number, item in rows:
        if len(hits) >= limit or (text and time.monotonic() > stop):
            return {"rows": hits, "next": number}
        if not text or text.casefold() in plain(item).casefold():
            hits.append({"row": number} | shown(item))
    return {"rows": hits, "next": None}


def _spec_data(session: Run) -> dict[str, Any]:
    return session.spec.get("data") or (session.spec.get("sft") or {}).get("data") or {}


def _sources(session: Run) -> dict[str, tuple[str, dict[str, Any]]]:
    """Where the sources of a run are, by their place in its spec."""
    folder, data = read_json(session.path / "manifest.json").get("folder", ""), _spec_data(session)
    parts = {f"data.{part}.{name}": one for part in ("train", "eval") for name, one in data.get(part, {}).items()}
    return {name: (str(Path(folder, Path(one["path"]).expanduser())), one) for name, one in parts.items()}


def _within(path: Path, where: str) -> bool:
    return fnmatchcase(str(path), where) or Path(where) in path.parents


def _stored(path: Path, places: Places, session: Run | None, row: int) -> Reader:
    """The documents of a token store, with the tokenizer of the same fingerprint."""
    if any((path / name).is_symlink() for name in (TOKENS, ENDS, LOSS)):
        raise NotThere(f"{path.name} has a link in it, which the view does not follow")
    store, known = TokenStore.open(path), places.runs()
    runs = [session] if session else [Run(one) for one in list(known.values())[:20]]  # any may have trained on it
    folders = [*places.tokenizers(), *(folder for run in runs for folder in tokenizer_folders(run, known))]
    fits = next((t for t in map(load_tokenizer, folders) if t and t.fingerprint == store.ledger.fingerprint), None)
    rows = ((number, store.example(number, LONG)) for number in range(row, len(store)))
    plain = lambda one: fits.decode(one.tokens.tolist()) if fits else ""  # noqa: E731
    return rows, plain, lambda one: {"parts": [_part("", one, fits)]}


def _filed(path: Path, places: Places, session: Run | None, row: int) -> Reader:
    """The rows of a file, and what the encoders of a run that trains on them make of each."""
    encoders, tokenizer = {}, None
    folder = next(tokenizer_folders(session, places.runs()), None) if session else None
    if session and folder and (tokenizer := load_tokenizer(folder)):
        with needs_extra("the tokens of examples", "view"):
            from palestra.data.encoders import encoders_of
        keys = [one.get("key") for where, one in _sources(session).values() if _within(path, where)]
        form = _spec_data(session).get("format")
        encoders = encoders_of(session.spec["kind"], folder, form, keys[0] if keys else None)

    def shown(content: Any) -> dict[str, Any]:
        parts = []
        for name, encode in encoders.items():
            try:
                parts.append(_part(name, encode([content])[0], tokenizer))
            except (PalestraError, *DAMAGED) as error:
                parts.append({"name": name, "error": str(error)})
        return {"content": content, "parts": parts}

    return rows_from(shards(path)[0], row), lambda one: json.dumps(one, ensure_ascii=False, default=str), shown


def _part(name: str, encoded: Any, tokenizer: Tokenizer | None) -> dict[str, Any]:
    tokens = [int(token) for token in encoded.tokens[:LONG]]
    mask = None if encoded.loss is None else [int(trained) for trained in encoded.loss[:LONG]]
    fits = tokenizer if tokenizer and max(tokens, default=0) < tokenizer.vocab_size else None
    texts = token_texts(tokens, fits)[0] if fits else None
    return {"name": name, "tokens": tokens, "mask": mask, "texts": texts, "more": len(encoded.tokens) - len(tokens)}

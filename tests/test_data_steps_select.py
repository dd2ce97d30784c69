"""The steps that choose and change rows: transform, decontaminate and consolidate, against slow readings of each."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.data.duplicates import WORD, ngram_hashes, word_hashes
from palestra.data.readers import Row
from palestra.data.steps.decontaminate import decontaminate
from palestra.data.steps.shards import sources
from palestra.data.steps.transform import consolidate, transform
from palestra.errors import PalestraError, UsageError

DATA = Path(os.environ.get("PALESTRA_DATA") or Path(__file__).parent.parent.parent / "shared" / "data")


def write(path: Path, rows: list[Any]) -> Path:
    """A file of JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def read(out: Path) -> list[Row]:
    """The rows of a step's output."""
    return [row for source in sources(out) for _, _, row in source.rows()]


def counts(out: Path) -> dict[str, Any]:
    """What a step noted."""
    return json.loads((out / "counts.json").read_text())


def sentences(row: Row, *, least: int = 1) -> Any:
    """Of a row each sentence; of an empty one nothing; of one that asks for it, itself changed."""
    if row.get("whole"):
        return {"text": row["text"].upper()}
    if row["text"] == "bad":
        return ["no row"]
    return [{"text": one} for one in row["text"].split(". ") if len(one) >= least]


def nothing(row: Row) -> None:
    """Leave all out."""


def test_transform_of_one_row_to_several_numbers_their_ids(tmp_path: Path) -> None:
    rows = [{"id": "a", "text": "One. Two"}, {"text": "x", "whole": True}, {"text": ""}]
    source = write(tmp_path / "in.jsonl", rows)
    transform(
        tmp_path / "out", source=source, function="test_data_steps_select:sentences", args={"least": 2}, workers=1
    )
    assert read(tmp_path / "out") == [
        {"text": "One", "id": "a.0"},
        {"text": "Two", "id": "a.1"},
        {"id": "in.jsonl:2", "text": "X"},
    ]
    assert counts(tmp_path / "out")["dropped"] == {"the function gave nothing": 1}
    transform(tmp_path / "none", source=source, function="test_data_steps_select:nothing", workers=1)
    assert counts(tmp_path / "none")["dropped"] == {"the function gave nothing": 3}


def test_transform_with_a_wrong_function_is_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [{"text": "bad"}])
    with pytest.raises(UsageError, match="has no function 'missing'"):
        transform(tmp_path / "a", source=source, function="test_data_steps_select:missing")
    with pytest.raises(UsageError, match=r"gave a str of row in\.jsonl:1"):
        transform(tmp_path / "b", source=source, function="test_data_steps_select:sentences", workers=1)


WORDS = st.lists(st.sampled_from("abcdefgh"), max_size=14)


@settings(max_examples=60, deadline=None)
@given(texts=st.lists(WORDS, min_size=1, max_size=5), tests=st.lists(WORDS, min_size=1, max_size=4))
def test_decontaminate_of_any_texts_is_what_sets_of_ngrams_say(
    tmp_path_factory: pytest.TempPathFactory, texts: list[list[str]], tests: list[list[str]]
) -> None:
    folder, n, overlap = tmp_path_factory.mktemp("decon"), 3, 0.7

    def grams(words: list[str]) -> set[tuple[str, ...]]:
        return {tuple(words[i : i + n]) for i in range(len(words) - n + 1)}

    source = write(folder / "in.jsonl", [{"text": " ".join(words)} for words in texts])
    against = write(folder / "eval.jsonl", [{"q": " ".join(words)} for words in tests])
    known = [grams(words) for words in tests if grams(words)]
    if not known:
        with pytest.raises(UsageError, match="none of the"):
            decontaminate(folder / "out", source=source, against={"e": against}, n=n, workers=1)
        return
    decontaminate(folder / "out", source=source, against={"e": against}, n=n, overlap=overlap, workers=1)
    every = set[tuple[str, ...]]().union(*known)
    expected = []
    for words in texts:
        mine = grams(words)
        of_text = max(len(mine & one) / len(one) for one in known)
        of_row = len(mine & every) / len(mine) if mine else 0.0
        expected.append(max(of_text, of_row) < overlap)
    assert [row["text"] for row in read(folder / "out")] == [
        " ".join(words) for words, kept in zip(texts, expected, strict=True) if kept
    ]
    assert counts(folder / "out")["dropped"].get("contaminated: e", 0) == expected.count(False)


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="ab cé,!", max_size=60), st.integers(1, 4))
def test_ngram_hashes_of_a_text_are_equal_where_words_are(text: str, n: int) -> None:
    words = WORD.findall(text.lower())
    hashes = ngram_hashes(word_hashes(text), n).tolist()
    grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    assert len(hashes) == len(grams)
    assert len(set(hashes)) == len(set(grams)) == len(set(zip(hashes, grams, strict=True)))


@pytest.mark.skipif(not DATA.exists(), reason="needs the shared data (PALESTRA_DATA)")
def test_decontaminate_against_real_sets_finds_planted_questions_and_nothing_else(tmp_path: Path) -> None:
    questions = [json.loads(line)["question"] for line in (DATA / "gsm8k/test.jsonl").open()]
    words = (DATA / "gutenberg/Dracula_345.txt").read_text().split()
    pages = [" ".join(words[i : i + 300]) for i in range(0, 60_000, 300)]
    rows = [{"text": page if n % 20 else f"{page} {questions[n].upper()}"} for n, page in enumerate(pages)]
    against = {"arc": DATA / "core_eval/arc_easy.jsonl", "gsm8k": DATA / "gsm8k/test.jsonl"}
    decontaminate(tmp_path / "out", source=write(tmp_path / "in.jsonl", rows), against=against, workers=1)
    assert counts(tmp_path / "out")["dropped"] == {"contaminated: gsm8k": 10}
    notes = [json.loads(line) for line in (tmp_path / "out/notes/notes-00000.jsonl").open()]
    assert [(note["id"], note["set"], note["hit"]) for note in notes] == [
        (f"in.jsonl:{n + 1}", "gsm8k", f"test.jsonl:{n + 1} question") for n in range(0, 200, 20)
    ]


def test_decontaminate_with_wrong_arguments_is_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [{"text": "x"}])
    with pytest.raises(UsageError, match="give the evaluation sets"):
        decontaminate(tmp_path / "out", source=source, against={})
    with pytest.raises(UsageError, match="overlap = 0"):
        decontaminate(tmp_path / "out", source=source, against={"e": source}, overlap=0.0)


def test_consolidate_by_rules_keeps_what_satisfies_all_and_counts_the_first_broken(tmp_path: Path) -> None:
    rows = [
        {"text": "a", "scores": {"good": 0.9}, "lang": "en"},
        {"text": "b", "scores": {"good": 0.2}, "lang": "en"},
        {"text": "c", "scores": {"good": 0.8}, "lang": "de"},
        {"text": "d", "lang": "en"},
    ]
    source = write(tmp_path / "in.jsonl", rows)
    keep = [{"column": "scores.good", "at_least": 0.5}, {"column": "lang", "one_of": ["en", "fr"]}]
    consolidate(tmp_path / "out", source=source, keep=keep, without=["scores"], workers=1)
    assert read(tmp_path / "out") == [{"id": "in.jsonl:1", "text": "a", "lang": "en"}]
    assert counts(tmp_path / "out")["dropped"] == {"not scores.good >= 0.5": 2, "not lang in ['en', 'fr']": 1}


@settings(max_examples=40, deadline=None)
@given(
    scores=st.lists(st.lists(st.integers(0, 6), max_size=8), min_size=1, max_size=3),
    fraction=st.floats(0.01, 1.0),
)
def test_consolidate_by_fraction_keeps_the_best_and_of_equals_the_first(
    tmp_path_factory: pytest.TempPathFactory, scores: list[list[int]], fraction: float
) -> None:
    folder = tmp_path_factory.mktemp("best")
    for number, part in enumerate(scores):
        write(folder / f"in/{number}.jsonl", [{"text": "t", "s": score} for score in part])
    consolidate(folder / "out", source=folder / "in", keep_fraction=fraction, by="s", workers=1)
    flat = [score for part in scores for score in part]
    best = sorted(range(len(flat)), key=lambda i: (-flat[i], i))[: int(np.ceil(fraction * len(flat)))]
    ids = [f"{number}.jsonl:{row}" for number, part in enumerate(scores) for row in range(1, len(part) + 1)]
    assert [row["id"] for row in read(folder / "out")] == [ids[i] for i in sorted(best)]


def test_consolidate_with_wrong_arguments_is_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [{"text": "a", "s": "high"}])
    with pytest.raises(UsageError, match=r"keep\.0: expected a column and one of"):
        consolidate(tmp_path / "out", source=source, keep=[{"column": "s", "above": 1}])
    with pytest.raises(UsageError, match="go together"):
        consolidate(tmp_path / "out", source=source, keep_fraction=0.5)
    with pytest.raises(PalestraError, match=r"row in\.jsonl:1: by: s is 'high'"):
        consolidate(tmp_path / "out", source=source, keep_fraction=0.5, by="s", workers=1)
    with pytest.raises(PalestraError, match="at_least compares numbers"):
        consolidate(tmp_path / "two", source=source, keep=[{"column": "s", "at_least": 1}], workers=1)

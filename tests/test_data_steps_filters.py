"""Quality filters: each rule by hand, repetition against a slow reading of its definition, real prose passes."""

import json
import os
from collections import Counter
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.data.steps.filters import (
    DUPLICATE_NGRAMS,
    Rules,
    broken_rules,
    duplicate_characters,
    filter_documents,
    repeated,
)
from palestra.errors import UsageError

DATA = Path(os.environ.get("PALESTRA_DATA") or Path(__file__).parent.parent.parent / "shared" / "data")
PROSE = (
    "It was the best of days, and with the sun above the hills we have come to the old town that lies beyond. "
    "Nobody had told us how far the road would be, or what would meet us there, so each of us carried bread, water "
    "and a lamp against the dark. When evening fell a small inn appeared between two crooked oaks."
)
OFF = Rules(None, None, None, None, None, None, None, None, None, None, None, False, None)


@pytest.mark.parametrize(
    ("text", "rules", "reason"),
    [
        (PROSE, Rules(), None),
        ("the cat and the dog", Rules(), "fewer than 50 words"),
        ("a b c", replace(OFF, max_words=2), "more than 2 words"),
        ("abc", replace(OFF, min_chars=4), "fewer than 4 characters"),
        ("abc", replace(OFF, max_chars=2), "more than 2 characters"),
        ("", OFF, "no words"),
        ("a b c d", replace(OFF, mean_word_length=(3.0, 10.0)), "mean word length"),
        ("word # word", replace(OFF, max_symbol_ratio=0.1), "symbols"),
        ("well… so… yes", replace(OFF, max_symbol_ratio=0.5), "symbols"),
        ("12 34 word", replace(OFF, min_alphabetic_words=0.8), "words without letters"),
        ("a1234", replace(OFF, min_letters=0.5), "share of letters"),
        ("- a\n- b\nc", replace(OFF, max_bullet_lines=0.5), "bullet lines"),
        ("a...\nb…\nc", replace(OFF, max_ellipsis_lines=0.5), "ellipsis lines"),
        ("nothing here helps", replace(OFF, min_stop_words=2), "stop words"),
        ("Der Hund und die Katze sind nicht hier", replace(OFF, languages=("en",)), "language de"),
        ("12 + 30 = 42", replace(OFF, languages=("en",)), "language unknown"),
        ("我们今天去图书馆看书", replace(OFF, languages=("zh",)), None),
        ("again\nagain\nagain\nonce", replace(OFF, repetition=True), "duplicate lines"),
    ],
)
def test_broken_rule_of_a_text_is_the_first_that_it_breaks(text: str, rules: Rules, reason: str | None) -> None:
    assert next(broken_rules(text, rules), None) == reason


def slow_duplicates(words: list[str], n: int) -> int:
    """Characters of words that are in an n-gram which occurred before, by marking each word."""
    seen, marked = set(), [False] * len(words)
    for start in range(len(words) - n + 1):
        gram = tuple(words[start : start + n])
        if gram in seen:
            marked[start : start + n] = [True] * n
        seen.add(gram)
    return sum(len(word) for word, is_marked in zip(words, marked, strict=True) if is_marked)


def slow_top(words: list[str], n: int) -> int:
    """Characters of the most frequent n-gram times how often it occurs; of those, the most."""
    grams = Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))
    most = max(grams.values(), default=0)
    return max((c * sum(map(len, gram)) for gram, c in grams.items() if c == most > 1), default=0)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["a", "bb", "ccc", "dddd", "e", "ff", "g" * 9]), max_size=60))
def test_repeated_of_any_words_is_what_the_definition_says(words: list[str]) -> None:
    total = sum(map(len, words))
    tops = [f"top {n}-gram" for n, share in ((2, 0.2), (3, 0.18), (4, 0.16)) if slow_top(words, n) > share * total]
    duplicates = [
        f"duplicate {n}-grams" for n, share in DUPLICATE_NGRAMS.items() if slow_duplicates(words, n) > share * total
    ]
    assert repeated(" ".join(words), words) == next(iter(tops + duplicates), None)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(["a", "bb", "ccc"]), max_size=40), st.integers(1, 5))
def test_duplicate_characters_of_any_words_count_each_once(words: list[str], n: int) -> None:
    ids = [("a", "bb", "ccc").index(word) for word in words]
    before = [0, *accumulate(map(len, words))]
    assert duplicate_characters(ids, before, n) == slow_duplicates(words, n)


def test_filter_counts_each_reason_and_keeps_the_rest(tmp_path: Path) -> None:
    texts = [PROSE, "too short", f"{PROSE}\n" * 5]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    filter_documents(tmp_path / "out", source=tmp_path / "in.jsonl", workers=1)
    counts = json.loads((tmp_path / "out/counts.json").read_text())
    assert (counts["rows_out"], counts["dropped"]) == (1, {"duplicate lines": 1, "fewer than 50 words": 1})
    with pytest.raises(UsageError, match="languages: xx are not known"):
        filter_documents(tmp_path / "bad", source=tmp_path / "in.jsonl", languages=["xx"], workers=1)


@pytest.mark.skipif(not DATA.exists(), reason="needs the shared data (PALESTRA_DATA)")
def test_filter_of_novels_keeps_nearly_all_chapters_and_drops_tables(tmp_path: Path) -> None:
    words = (DATA / "gutenberg/The-War-of-the-Worlds_36.txt").read_text().split()
    chapters = [" ".join(words[i : i + 800]) for i in range(0, 40_000, 800)]
    assert sum(not list(broken_rules(chapter, Rules(languages=("en",)))) for chapter in chapters) >= 49
    table = "\n".join(f"{n} | {n * n} | {n**3}" for n in range(200))
    assert any(broken_rules(table, Rules()))


def test_first_rows_that_were_dropped_are_kept_for_each_reason(tmp_path: Path):
    rows = [{"id": f"r{number}", "text": "short" if number % 2 else None} for number in range(60)]
    rows += [{"id": "long", "text": "the cat and the dog of that house " * 200}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rules = {"min_words": 5, "max_words": 1000, "repetition": False}
    filter_documents(tmp_path / "out", source=tmp_path / "rows.jsonl", workers=1, **rules)
    samples = json.loads((tmp_path / "out" / "dropped.json").read_text())
    counts = json.loads((tmp_path / "out" / "counts.json").read_text())
    assert samples.keys() == counts["dropped"].keys()
    assert samples["fewer than 5 words"] == [{"id": f"r{n}", "text": "short"} for n in range(1, 40, 2)]  # the first 20
    assert [row["id"] for row in samples["no text"]] == [f"r{n}" for n in range(0, 40, 2)]
    (long,) = samples["more than 1000 words"]
    assert (long["id"], len(long["text"])) == ("long", 500)

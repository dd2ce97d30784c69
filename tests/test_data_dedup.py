"""Exact and near deduplication of real files: what stays, for any shards and workers, and over kills."""

import gzip
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest
import zygote
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.data.duplicates import normalized
from palestra.data.steps import dedup as dedup_module
from palestra.data.steps.dedup import dedup_exact, dedup_fuzzy
from palestra.errors import UsageError
from palestra.pipeline.data import data_step
from palestra.pipeline.graph import Graph

SYLLABLES = [a + b for a in "bdfgklmnprstvz" for b in ("a", "e", "i", "o", "u", "an", "el", "ir")]


def story(rng: random.Random, words: int = 120) -> list[str]:
    return ["".join(rng.choices(SYLLABLES, k=rng.randint(1, 4))) for _ in range(words)]


def edited(words: list[str], changes: int, rng: random.Random) -> list[str]:
    changed = list(words)
    for place in rng.sample(range(len(words)), changes):
        changed[place] = "".join(rng.choices(SYLLABLES, k=2))
    return changed


def corpus(count: int, seed: int = 0) -> tuple[list[dict], set[str]]:
    """Documents of which every fifth is a near duplicate of the one before; and the ids of these."""
    rng = random.Random(seed)
    rows, copies = [], set()
    for number in range(count):
        if number % 5 == 4:
            words = edited(rows[-1]["text"].split(), 2, rng)
            copies.add(f"d{number}")
        else:
            words = story(rng)
        rows.append({"id": f"d{number}", "text": " ".join(words), "extra": number})
    return rows, copies


def write(folder: Path, rows: list[dict], shards: int) -> Path:
    folder.mkdir(parents=True)
    for shard in range(shards):
        low, high = shard * len(rows) // shards, (shard + 1) * len(rows) // shards
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows[low:high])
        if shard % 2:
            (folder / f"part-{shard:03}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
        else:
            (folder / f"part-{shard:03}.jsonl").write_text(lines)
    return folder


def read(out: Path, folder: str = "docs") -> list[dict]:
    return [json.loads(line) for path in sorted((out / folder).iterdir()) for line in path.read_text().splitlines()]


def counts(out: Path) -> dict:
    return json.loads((out / "counts.json").read_text())


def test_dedup_exact_of_documents_keeps_the_first_of_each_normalized_text(tmp_path):
    rows = [{"text": t} for t in ("One two", "three", "one  TWO\n", "", "three.", "three", " ", None)]
    dedup_exact(tmp_path / "out", source=write(tmp_path / "in", rows, 3), workers=1)
    assert [row["text"] for row in read(tmp_path / "out")] == ["One two", "three", "", "three."]
    said = counts(tmp_path / "out")
    assert (said["rows_in"], said["rows_out"]) == (8, 4)
    assert said["dropped"] == {"duplicate": 3, "no text": 1}
    assert (said["documents"], said["unique"]) == (7, 4)
    notes = read(tmp_path / "out", "notes")
    assert [note["duplicate_of"] for note in notes] == [
        {"shard": 0, "document": 1},
        {"shard": 0, "document": 2},
        {"shard": 1, "document": 2},
    ]


def test_dedup_exact_of_paragraphs_drops_what_came_before_in_any_document(tmp_path):
    texts = ["A b.\n\nmenu\n\nC", "menu\n\nD\n\nD", "MENU\n\n\n\nc", "plain", "", "new\n\n\n\nmenu"]
    source = write(tmp_path / "in", [{"id": str(i), "text": text} for i, text in enumerate(texts)], 2)
    dedup_exact(tmp_path / "out", source=source, of="paragraphs", workers=1)
    assert {row["id"]: row["text"] for row in read(tmp_path / "out")} == {
        "0": "A b.\n\nmenu\n\nC",
        "1": "D",
        "3": "plain",
        "4": "",
        "5": "new\n\n",
    }
    assert counts(tmp_path / "out")["dropped"] == {"nothing new": 1}


def test_dedup_exact_of_lines_counts_each_line(tmp_path):
    source = write(tmp_path / "in", [{"id": "a", "text": "x\ny\nx"}, {"id": "b", "text": "y\nz"}], 1)
    dedup_exact(tmp_path / "out", source=source, of="lines", workers=1)
    assert [row["text"] for row in read(tmp_path / "out")] == ["x\ny", "z"]
    assert counts(tmp_path / "out")["lines"] == 5


@settings(max_examples=25, deadline=None)
@given(st.lists(st.text("ab \n", max_size=4), min_size=1, max_size=12), st.integers(1, 4))
def test_dedup_exact_of_any_documents_equals_a_set(tmp_path_factory, texts, shards):
    folder = tmp_path_factory.mktemp("dedup")
    rows = [{"id": str(number), "text": text} for number, text in enumerate(texts)]
    dedup_exact(folder / "out", source=write(folder / "in", rows, shards), workers=1)
    seen: set[str] = set()
    stays = [row for row in rows if not (normalized(row["text"]) in seen or seen.add(normalized(row["text"])))]
    assert read(folder / "out") == stays


def test_dedup_fuzzy_with_planted_copies_drops_just_these(tmp_path):
    rows, copies = corpus(100)
    dedup_fuzzy(tmp_path / "out", source=write(tmp_path / "in", rows, 3), workers=1)
    stay = read(tmp_path / "out")
    assert stay == [row for row in rows if row["id"] not in copies]
    said = counts(tmp_path / "out")
    assert said["dropped"] == {"near duplicate": 20}
    assert said["groups"] == 20
    assert {note["id"] for note in read(tmp_path / "out", "notes")} == copies
    assert not (tmp_path / "out" / ".shards" / "hashes").exists()  # what was only on the way is gone


@pytest.mark.parametrize(("unit", "workers"), [("characters", 2), ("words", 1)])
def test_dedup_fuzzy_for_any_shards_and_workers_gives_the_same(tmp_path, unit, workers):
    rows, _ = corpus(60, seed=1)
    rows[7]["text"] = rows[49]["text"] = rows[3]["text"]
    wanted = None
    for shards in (1, 6):
        out = tmp_path / f"out-{shards}"
        source = write(tmp_path / f"in-{shards}", rows, shards)
        dedup_fuzzy(out, source=source, shingle=3, unit=unit, workers=workers)
        wanted = wanted or read(out)
        assert read(out) == wanted
        assert len(wanted) < len(rows)


def test_dedup_fuzzy_without_a_threshold_takes_every_candidate(tmp_path):
    # With one band of one row, half the shingles in common make candidates about half the time.
    rng = random.Random(5)
    rows = []
    for number in range(0, 60, 2):
        one = story(rng)
        rows += [
            {"id": str(number), "text": " ".join(one)},
            {"id": str(number + 1), "text": " ".join(edited(one, 20, rng))},
        ]
    source = write(tmp_path / "in", rows, 2)
    dedup_fuzzy(tmp_path / "all", source=source, bands=60, rows=1, threshold=None, workers=1)
    dedup_fuzzy(tmp_path / "verified", source=source, bands=60, rows=1, threshold=0.95, workers=1)
    assert counts(tmp_path / "all")["rows_out"] < 30
    assert counts(tmp_path / "verified")["rows_out"] == 60
    assert counts(tmp_path / "verified")["compared"] > 30


def test_dedup_fuzzy_of_empty_and_short_texts_works(tmp_path):
    rows = [{"id": str(n), "text": t} for n, t in enumerate(["", "a", "", "A ", "ab", "\u00e9"])]
    dedup_fuzzy(tmp_path / "out", source=write(tmp_path / "in", rows, 2), workers=1)
    assert [row["id"] for row in read(tmp_path / "out")] == ["0", "1", "4", "5"]


def test_dedup_of_half_surrogates_drops_them_and_keeps_their_neighbours(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"text": "bad \\ud800 text here"}\n{"text": "good"}\n{"text": "good"}\n')
    for step in (dedup_exact, dedup_fuzzy):
        out = tmp_path / step.__name__
        step(out, source=tmp_path / "in.jsonl", workers=1)
        assert [row["text"] for row in read(out)] == ["good"]
        assert counts(out)["dropped"]["not valid Unicode"] == 1


def test_dedup_again_in_the_same_folder_changes_nothing_and_reads_nothing(tmp_path, monkeypatch):
    rows, _ = corpus(50)
    source = write(tmp_path / "in", rows, 2)
    dedup_fuzzy(tmp_path / "out", source=source, workers=1)
    before = read(tmp_path / "out"), counts(tmp_path / "out")
    monkeypatch.setattr(dedup_module, "normalized", None)
    dedup_fuzzy(tmp_path / "out", source=source, workers=1)
    assert (read(tmp_path / "out"), counts(tmp_path / "out")) == before


def test_dedup_of_a_changed_source_is_decided_anew(tmp_path):
    source = write(tmp_path / "in", [{"text": "one"}, {"text": "two"}, {"text": "one"}, {"text": "three"}], 2)
    dedup_exact(tmp_path / "out", source=source, workers=1)
    assert [row["text"] for row in read(tmp_path / "out")] == ["one", "two", "three"]
    (source / "part-000.jsonl").write_text('{"text": "two"}\n{"text": "three"}\n')
    dedup_exact(tmp_path / "out", source=source, workers=1)
    assert [row["text"] for row in read(tmp_path / "out")] == ["two", "three", "one"]
    assert [note["duplicate_of"] for note in read(tmp_path / "out", "notes")] == [{"shard": 0, "document": 2}]


def test_dedup_with_wrong_arguments_says_what_they_can_be(tmp_path):
    source = write(tmp_path / "in", [{"text": "one"}], 1)
    with pytest.raises(UsageError, match="documents, paragraphs, lines"):
        dedup_exact(tmp_path / "out", source=source, of="words")  # pyrefly: ignore
    with pytest.raises(UsageError, match="above 0, at most 1"):
        dedup_fuzzy(tmp_path / "out", source=source, threshold=1.5)
    dedup_fuzzy(tmp_path / "out", source=source, workers=1)
    with pytest.raises(UsageError, match="begun with seed = 42"):
        dedup_fuzzy(tmp_path / "out", source=source, seed=1, workers=1)


def test_dedup_killed_at_any_time_goes_on_to_the_same_output(tmp_path):
    rows, copies = corpus(300, seed=2)
    source = write(tmp_path / "in", rows, 12)
    code = (
        "import sys; from pathlib import Path; from palestra.data.steps.dedup import dedup_fuzzy\n"
        "dedup_fuzzy(Path(sys.argv[1]), source=sys.argv[2], workers=1)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "out"), str(source)]
    seen, rng = set(), random.Random(0)
    for _ in range(3):
        process = zygote.Popen(command)
        ledger, before = tmp_path / "out" / ".shards", len(list((tmp_path / "out").rglob("*.json")))
        # Some shards after the last kill: in the phase that comes next.
        enough, deadline = before + rng.randint(3, 6), time.monotonic() + 60
        while process.poll() is None and len(list((tmp_path / "out").rglob("*.json"))) < enough:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        seen.update(path.name for path in ledger.iterdir() if path.is_dir())
        if (tmp_path / "out" / "counts.json").exists():
            break
    assert "hashes" in seen
    dedup_fuzzy(tmp_path / "out", source=source, workers=1)
    assert read(tmp_path / "out") == [row for row in rows if row["id"] not in copies]
    assert counts(tmp_path / "out")["rows_in"] == 300


def test_dedup_as_steps_of_a_pipeline_have_one_address_for_any_number_of_workers():
    addresses = {Graph([data_step("dedup_fuzzy")(source="in", workers=workers)]).targets[0] for workers in (1, 2, 8)}
    other = Graph([data_step("dedup_fuzzy")(source="in", threshold=0.9)]).targets[0]
    assert len(addresses) == 1
    assert other not in addresses

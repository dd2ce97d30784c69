"""Datasets in the web view: rows from any number on, tokens and masks as training has them, and nothing else."""

import json
from pathlib import Path
from typing import Any

import pytest
from view_runs import View, demo_folder  # noqa: F401

from palestra.data.encoders import ChatEncoder
from palestra.data.tokenizers import character_tokenizer
from palestra.runs.manifest import manifest
from palestra.runs.run import new_trial
from palestra.runs.session import Session

TEXTS = [f"question {number}" for number in range(2500)]


def write_rows(path: Path, rows: list[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))  # no last line break


def trained_on(root: Path, kind: str, where: str) -> str:
    """A run of a kind whose data is at a place, with a checkpoint that has a tokenizer."""
    spec = {"kind": kind, "name": kind, "data": {"train": {"chat": {"path": where}}, "format": "plain"}}
    trial = new_trial(root, kind, seeds=[0], command=["test"], spec=spec)
    about = manifest(spec_hash="0", seed=0, command=["test"])
    Session.create(trial.session(0), spec_yaml="", spec_data=spec, manifest=about)
    letters = [chr(code) for code in range(32, 127)]
    character_tokenizer(letters).save(trial.session(0) / "checkpoints" / "step_000000001" / "model")
    return f"{kind}/{trial.path.name}"


def pages(view: View, **params: Any) -> list[dict[str, Any]]:
    """All pages of a request."""
    found, row = [], 0
    while row is not None:
        answer = view.get("data/rows", **params, row=row)
        found, row = found + answer["rows"], answer["next"]
    return found


def test_rows_are_found_by_number_and_text_in_a_file_of_several_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("palestra.data.readers.COUNTED", 1000)
    write_rows(tmp_path / "d" / "rows.jsonl", [{"text": text} for text in TEXTS])
    view = View(tmp_path)
    (one,) = view.get("data")["sets"]
    assert (one["path"], one["tokens"]) == (f"{tmp_path.name}/d/rows.jsonl", False)
    for number in (0, 1, 36, 37, 1234, 2499):
        answer = view.get("data/rows", path=one["path"], row=number, limit=2)
        assert [(row["row"], row["content"]["text"]) for row in answer["rows"]] == list(enumerate(TEXTS))[number:][:2]
        assert answer["next"] == (number + 2 if number + 2 < 2500 else None)
    assert view.get("data/rows", path=one["path"], row=9999)["rows"] == []
    hits = pages(view, path=one["path"], text="QUESTION 249")
    assert [row["row"] for row in hits] == [249, *range(2490, 2500)]


def test_lines_that_are_not_json_are_shown_as_text_and_parquet_is_read_from_its_row_group(tmp_path: Path):
    import pyarrow
    import pyarrow.parquet

    write_rows(tmp_path / "bad.jsonl", [{"a": 1}, "{not json", "[1, 2]", {"a": 2}])
    table = pyarrow.table({"text": TEXTS})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=300)
    view = View(tmp_path)
    rows = view.get("data/rows", path=f"{tmp_path.name}/bad.jsonl")["rows"]
    assert [row["content"] for row in rows] == [{"a": 1}, "{not json\n", [1, 2], {"a": 2}]
    for number in (0, 299, 300, 1700):
        answer = view.get("data/rows", path=f"{tmp_path.name}/rows.parquet", row=number, limit=1)
        assert [(row["row"], row["content"]["text"]) for row in answer["rows"]] == [(number, TEXTS[number])]


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_tokens_and_masks_are_those_of_the_encoder_that_trains(tmp_path: Path, kind: str):
    pair = {"prompt": "2+2=", "completion": "4", "chosen": "4!", "rejected": "5"}
    write_rows(tmp_path / "data" / "chat.jsonl", [pair, {"nothing": 1}])
    run = trained_on(tmp_path / "runs", kind, str(tmp_path / "data"))
    view = View(tmp_path)
    listed = view.get("data", run=f"runs/{run}")
    assert [(one["source"], one["path"]) for one in listed["sets"]] == [
        ("data.train.chat", f"{tmp_path.name}/data/chat.jsonl")
    ]
    first, second = view.get("data/rows", path=listed["sets"][0]["path"], run=f"runs/{run}")["rows"]
    folder = next((tmp_path / "runs" / run).glob("sessions/*/checkpoints/*/model"))
    for part, side in zip(first["parts"], (None,) if kind == "sft" else ("chosen", "rejected"), strict=True):
        encoded = ChatEncoder.load(folder, format="plain", side=side)([pair])[0]
        assert part["tokens"] == list(encoded.tokens)
        assert [bool(trained) for trained in part["mask"]] == list(encoded.loss or ())
        assert "".join(part["texts"]).startswith("2+2=")
        assert 0 < sum(part["mask"]) < len(part["mask"])
    assert all("expected a row with" in part["error"] for part in second["parts"])


def test_sources_that_are_not_served_are_named_and_not_read(tmp_path: Path):
    write_rows(tmp_path / "elsewhere" / "chat.jsonl", [{"prompt": "secret", "completion": "x"}])
    run = trained_on(tmp_path / "runs", "sft", str(tmp_path / "elsewhere"))
    (tmp_path / "runs" / "link.jsonl").symlink_to(tmp_path / "elsewhere" / "chat.jsonl")
    view = View(tmp_path / "runs")
    answer = view.get("data", run=run)
    assert answer["sets"] == []
    assert "give its folder to palestra view" in answer["missing"][0]
    for path in ("runs/link.jsonl", "../elsewhere/chat.jsonl", str(tmp_path / "elsewhere" / "chat.jsonl")):
        assert "there is no dataset" in view.get("data/rows", 404, path=path)["detail"]


def test_token_store_of_a_pipeline_is_decoded_with_its_tokenizer(demo_folder: Path):  # noqa: F811
    view = View(demo_folder)
    sets = {one["path"]: one for one in view.get("data")["sets"]}
    (store,) = [path for path, one in sets.items() if one["tokens"]]
    (docs,) = [path for path in sets if "dedup_exact" in path and "/docs/" in path]
    stored, written = pages(view, path=store), pages(view, path=docs)
    assert len(stored) == len(written) > 20
    for row, source in zip(stored, written, strict=True):
        (part,) = row["parts"]
        assert part["mask"] is None
        assert "".join(part["texts"]).startswith(source["content"]["text"])
    word = written[3]["content"]["text"][:40]
    assert 3 in [row["row"] for row in pages(view, path=store, text=word)]

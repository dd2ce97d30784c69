"""Steps that train models: tokens, a pretrained model and its fine-tuning, each from the output of the one before."""

import json
from pathlib import Path

import pytest

from palestra.errors import PalestraError, UsageError
from palestra.kinds.models import find_model
from palestra.pipeline.form import load_pipeline
from palestra.pipeline.graph import Graph
from palestra.pipeline.outputs import Outputs
from palestra.pipeline.report import write_report
from palestra.pipeline.runner import run
from palestra.runs.run import open_run

SHAPE = {"layers": 1, "width": 16, "heads": 2, "mlp": 32, "context": 32}
TRAIN = {"steps": 2, "batch": 2, "precision": "fp32"}


def pipeline(folder: Path, **sft: object) -> dict:
    docs = folder / "docs.jsonl"
    docs.write_text("".join(json.dumps({"id": n, "text": f"story {n} of the sea " * 9}) + "\n" for n in range(20)))
    chats = folder / "chats.jsonl"
    chats.write_text("".join(json.dumps({"prompt": f"{n}+1=", "completion": str(n + 1)}) + "\n" for n in range(9)))
    return {
        "kind": "pipeline",
        "name": "small",
        "steps": {
            "vocabulary": {"use": "train_tokenizer", "with": {"source": str(docs), "vocab_size": 300}},
            "tokens": {
                "use": "tokenize",
                "with": {"source": str(docs), "tokenizer": "step:vocabulary", "workers": 1},
            },
            "pretrain": {
                "spec": {
                    "kind": "pretrain",
                    "model": {"tokenizer": "step:vocabulary", "shape": SHAPE},
                    "data": {"train": {"a": {"path": "step:tokens"}}, "context": 16, "holdout": 0.1},
                    "train": TRAIN,
                    "device": "cpu",
                }
            },
            "sft": {
                "spec": {
                    "kind": "sft",
                    "model": {"init": "step:pretrain"},
                    "data": {"train": {"a": {"path": str(chats)}}, "context": 16, "format": "plain"},
                    "train": TRAIN,
                    "device": "cpu",
                    **sft,
                }
            },
        },
    }


def test_models_and_tokens_of_steps_are_found_by_those_after_them(tmp_path, monkeypatch, pictures):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PALESTRA_CACHE", str(tmp_path / "cache"))
    outputs = Outputs(tmp_path / "out")
    steps = load_pipeline(pipeline(tmp_path)).steps
    graph = Graph(steps)
    assert len(run(steps, outputs).ran) == 4
    folders = {node.step.name: outputs.path(node.address) for node in graph.nodes.values()}
    found = open_run(folders["sft"])
    assert found.state == "done"
    assert found.spec["model"]["init"] == str(folders["pretrain"])
    assert find_model(folders["sft"]).folder.is_relative_to(folders["sft"])
    # No file of what is done names the folder that it was made in.
    for path in (tmp_path / "out").rglob("*.json"):
        if ".steps" not in path.parts and path.name != "trial.json":
            assert ".partial" not in path.read_text(), path
    page = Path(write_report("small", graph, outputs)).read_text()
    assert "bits_per_byte" in page
    assert "data:image/png;base64," in page
    # Other learning rates train the last one alone anew.
    changed = load_pipeline(pipeline(tmp_path, optim={"name": "adamw", "lr": 1e-3})).steps
    assert [one.partition("-")[0] for one in run(changed, outputs).ran] == ["sft"]


def test_tokens_of_another_tokenizer_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PALESTRA_CACHE", str(tmp_path / "cache"))
    data = pipeline(tmp_path)
    del data["steps"]["sft"]
    steps = data["steps"]
    steps["other"] = {"use": "train_tokenizer", "with": {**steps["vocabulary"]["with"], "vocab_size": 264}}
    steps["pretrain"]["spec"]["model"]["tokenizer"] = "step:other"
    with pytest.raises((UsageError, PalestraError), match="was tokenized with"):
        run(load_pipeline(data).steps, Outputs(tmp_path / "out"))

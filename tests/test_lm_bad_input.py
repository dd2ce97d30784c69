"""A language-model spec that cannot run is refused in one clear paragraph, before there is a run folder."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_lm import EXPERTS, MUON, SHAPE, Lab, write_rows

import palestra
from palestra.errors import PalestraError
from palestra.runs.run import new_trial, open_run

BASE = {"model__init": "models/base"}
STAGE = {"step": 1, "weights": {"text": 1.0}}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A folder with a finished run `base` in `models`, in which nothing else is to be left."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PALESTRA_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        patch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody answers there
        made = Lab(tmp_path_factory.mktemp("lab"))
        patch.chdir(made.path)
        made.run("sft", name="base", train__steps=1)
        made.root.rename(made.path / "models")
        yield made


def model_of(lab: Lab) -> Path:
    return open_run("base", lab.path / "models").checkpoint("last") / "model"


def refused(lab: Lab, kind: str, **changes: Any) -> str:
    """What the user is told; nothing is left behind."""
    with pytest.raises(PalestraError) as raised:
        palestra.run(lab.spec(kind, **changes), root=lab.root, quiet=True)
    assert not lab.root.exists()
    return str(raised.value)


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("sft", {"model__init": "runs/nobody"}, ["no run 'runs/nobody'"]),
        ("sft", {"model__init": "nobody"}, ["found no model 'nobody'", "no file or folder nobody"]),
        ("sft", {"model__init": "some/body"}, ["found no model 'some/body'", "PALESTRA_MIRROR is not set", "Hub"]),
        ("sft", {"model__init": "."}, [". is not a model: it is neither a run, nor a checkpoint, nor a folder"]),
        ("sft", {"model__tokenizer": "/no/tokenizer"}, ["/no/tokenizer"]),
        ("pretrain", {"model__shape": {**SHAPE, "vocab": 8}}, ["model.shape.vocab: 8 tokens, fewer than the"]),
        ("sft", {"data__train": {"x": {"path": "x.jsonl"}}}, ["there is no file x.jsonl in"]),
        ("pretrain", {"data__train": {"x": {"path": "*.parquet"}}}, ["no file matches *.parquet"]),
        ("pretrain", {"data__context": 64}, ["data.context", "at most model.shape.context = 48"]),
        ("sft", {"data__context": 64}, ["data.context", "at most model.shape.context = 48"]),
        ("sft", {"data__train": {"x": {"path": "text.jsonl"}}}, ["text.jsonl:1: expected a row with 'messages'"]),
        ("dpo", {**BASE, "data__train": {"x": {"path": "chat.jsonl"}}}, ["chat.jsonl:1: ", "'chosen'"]),
        ("dpo", {}, ["model.init: expected a trained model"]),
        ("sft", {**BASE, "data__context": 49}, ["data.context: 49 tokens exceed"]),
        ("sft", {"samples": {"prompts": ["RED"]}}, ["has no token for 'D', 'E', 'R'"]),
        ("sft", {"samples": {"prompts": ["red " * 20]}}, ["samples.prompts: 'red red", "expected 1 to 47"]),
        ("sft", {"data__eval": {"chat": {"path": "chat.jsonl"}}}, ["data.eval.chat", "that data.train does not have"]),
        ("sft", {"data__train": {"chat": {"path": "chat.jsonl", "weight": 0.0}}}, ["data.train", "one weight above 0"]),
        ("sft", {"data__mix": {"stop": "first_exhausted"}}, ["data.mix.stop: first_exhausted ends the data after 54"]),
        ("pretrain", {"data__stages": [{"step": 1, "weights": {"text": 1.0}}]}, ["data.stages", "a block of 2048"]),
        ("pretrain", {"data__stages": [{"step": 1, "weights": {"txt": 1.0}}]}, ["data.stages.0.weights", "txt"]),
        ("pretrain", {"data__stages": [STAGE, STAGE]}, ["data.stages.1.step", "expected more than 1"]),
        ("pretrain", {"data__stages": [{**STAGE, "step": 12}]}, ["data.stages.0.step", "less than train.steps = 12"]),
        ("pretrain", {"data__stages": [{"step": 1, "weights": {"text": 0}}]}, ["data.stages.0.weights", "above 0"]),
        ("pretrain", {"data__stages": [{"step": 1, "weights": {}}]}, ["data.stages.0.weights", "above 0"]),
        ("sft", {"data__eval": {"x": {"path": "chat.jsonl", "weight": 2.0}}}, ["data.eval.x.weight: unknown key"]),
        ("sft", {**BASE, "model__lora": {"rank": 4}, "optim": MUON}, ["optim.name", "trained with AdamW"]),
        ("reward_model", {**BASE, "data__format": "plain"}, ["data.format", "a reward model scores conversations"]),
        ("sft", {"train__compile": "off", "train__compile_cache": "x"}, ["train.compile_cache", "compiles nothing"]),
        ("sft", {"model__shape": {**SHAPE, "mlp": None}}, ["model.shape.mlp", "or `moe` in its place"]),
        ("sft", {"model__shape__window_from": 1}, ["model.shape.window_from", "there is no `window`"]),
        ("sft", {"model__shape__rope_theta": 1.0}, ["model.shape.rope_theta"]),
        ("sft", {"train__profile": {"steps": [3, 99]}}, ["train.profile.steps", "within 1 to 12"]),
        ("sft", {"threads": 0}, ["threads"]),
        ("sft", {"train__batchsize": 3}, ["train.batchsize", "batch"]),
        ("sft", {"model__lora": {"rank": 4}}, ["model.lora", "adapters need a trained model"]),
        ("reward_model", {**BASE, "model__lora": {"rank": 4}}, ["model.lora", "expected null"]),
        ("sft", {**BASE, "model__tokenizer": "characters"}, ["model.tokenizer", "`init` brings its own"]),
        ("sft", {**BASE, "model__shape": SHAPE}, ["model.shape", "`init` brings its own"]),
        ("sft", {"hooks": ["no_such_module:hook"]}, ["hooks: no_such_module cannot be imported"]),
    ],
)
def test_spec_that_cannot_run_is_refused_with_the_place_and_leaves_no_folder(lab, kind, changes, said):
    told = refused(lab, kind, **changes)
    for text in said:
        assert text in told
    assert "Traceback" not in told


def test_width_of_the_mlp_beside_experts_is_refused(lab):
    spec = lab.spec("sft", model__shape__moe=EXPERTS)
    spec["model"]["shape"]["mlp"] = 48
    with pytest.raises(PalestraError, match=r"model\.shape\.mlp: expected null, because `moe` replaces the MLP"):
        palestra.check(spec)


def test_empty_and_damaged_data_are_refused_with_the_place(lab):
    (lab.path / "empty.jsonl").touch()
    assert "empty.jsonl" in refused(lab, "sft", data__train={"x": {"path": "empty.jsonl"}})
    rows = [json.dumps({"prompt": "red", "completion": "cat"}), "{"]
    (lab.path / "torn.jsonl").write_text("\n".join(rows))
    assert "torn.jsonl:2" in refused(lab, "sft", data__train={"x": {"path": "torn.jsonl"}})
    write_rows(lab.path / "new.jsonl", [{"prompt": "red", "completion": "CAT"}])
    told = refused(lab, "sft", model__init="models/base", data__train={"x": {"path": "new.jsonl"}}, data__holdout=0.0)
    assert "new.jsonl:1: the tokenizer model has no token for 'A', 'C', 'T'" in told


def test_tokenizer_larger_than_the_model_is_refused_with_both_sizes(lab, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(model_of(lab), folder)
    document = json.loads((folder / "tokenizer.json").read_text())
    more = {f"<|{n}|>": 30 + n for n in range(100)}
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    taken = max(entry["id"] for entry in document["added_tokens"]) + 1
    document["added_tokens"] += [{"id": taken + i, "content": name, **added} for i, name in enumerate(more)]
    (folder / "tokenizer.json").write_text(json.dumps(document))
    told = refused(lab, "sft", model__init=str(folder))
    assert f"model.init: {folder} has embeddings for 64 tokens, fewer than the {taken + 100} of the tokenizer" in told


def test_chat_with_a_model_without_template_is_refused_unless_one_is_given(lab, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(model_of(lab), folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    template = config.pop("chat_template")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    told = refused(lab, "sft", model__init=str(folder))
    assert "has no chat template" in told
    assert "model.chat_template" in told
    run = lab.run("sft", model__init=str(folder), model__chat_template=template, train__steps=1)
    assert palestra.load(run).tokenizer.chat_template == template
    shutil.rmtree(lab.root)


def test_model_that_is_damaged_is_refused_with_what_is_missing(lab, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(model_of(lab), folder)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    assert "tokenizer" in refused(lab, "sft", model__init=str(folder))
    (folder / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    assert "mamba" in refused(lab, "sft", model__init=str(folder))


def test_command_says_what_is_wrong_in_one_paragraph_with_exit_code_2(scratch, tmp_path):
    lab = Lab(tmp_path)
    spec = scratch.spec("wrong", lab.spec("pretrain", model__shape={**SHAPE, "vocab": 8}))
    result = scratch("train", spec, "--quiet", PALESTRA_CACHE=str(tmp_path / "cache"))
    assert result.returncode == 2
    assert result.stderr.startswith("palestra: model.shape.vocab: 8 tokens, fewer than the")
    assert len(result.stderr.strip().splitlines()) == 1
    assert not (scratch.path / "runs").exists()


def test_run_without_a_checkpoint_cannot_be_started_from(lab):
    new_trial(lab.path / "models", "fresh", seeds=[0], command=[], spec={})
    assert "has no complete checkpoint yet" in refused(lab, "sft", model__init="models/fresh")

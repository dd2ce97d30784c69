"""The optimizers' specs as a kind would hold them: told apart by name, read from plain data, written back."""

from typing import Annotated

import pytest
from pydantic import Field, TypeAdapter, ValidationError

from palestra.cli.show import show_check
from palestra.spec.lm import AdamWSpec, MuonSpec, OptimSpec
from palestra.spec.load import load, spec_hash
from palestra.spec.model import Cadence, plain
from palestra.spec.schedule import Schedule, in_fractions, warmup_conflicts
from palestra.spec.validate import SpecError

OPTIM = TypeAdapter(Annotated[OptimSpec, Field(discriminator="name")])


@pytest.mark.parametrize(("name", "made"), [("adamw", AdamWSpec), ("muon", MuonSpec)])
def test_optim_plain_data_comes_back_as_it_was_written(name, made):
    lr = {"shape": "wsd", "start": 0.01, "begin": 0.8, "warmup": "100 steps"}
    spec = OPTIM.validate_python({"name": name, "lr": lr, "betas": [0.8, 0.98], "max_grad_norm": None})
    assert isinstance(spec, made)
    assert spec.lr.warmup == Cadence(100, "steps")
    written = OPTIM.dump_python(spec, mode="json")
    assert written["lr"] == {**lr, "end": 0.0, "finish": 1.0}
    assert OPTIM.validate_python(written) == spec


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "sgd"},
        {"name": "adamw", "momentum": 0.9},
        {"name": "adamw", "betas": [0.9]},
        {"name": "adamw", "betas": [0.9, 1.0]},
        {"name": "adamw", "lr": -1e-3},
        {"name": "muon", "adam_lr": {"shape": "linear", "start": 1e-3, "end": -1.0}},
        {"name": "muon", "ns_steps": 0},
        {"name": "muon", "max_grad_norm": 0.0},
    ],
)
def test_optim_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(ValidationError):
        OPTIM.validate_python(wrong)


def test_optim_warmups_are_counted_for_each_rate():
    rates = {
        key: Schedule(shape="linear", start=1.0, finish=0.5, warmup=Cadence(10, "steps")) for key in ("lr", "adam_lr")
    }
    spec = MuonSpec(name="muon", **rates)
    assert in_fractions(spec, 40).adam_lr.warmup == 0.25
    assert not list(warmup_conflicts(spec, 21, "optim"))
    assert [path for path, _ in warmup_conflicts(spec, 20, "optim")] == [
        ("optim", "lr", "warmup"),
        ("optim", "adam_lr", "warmup"),
    ]
    assert "'finish' (0.5 of the run)" in next(warmup_conflicts(spec, 20, "optim")).reason


TEXTS = {"data": {"train": {"texts": {"path": "texts.jsonl"}}, "context": 8}, "train": {"steps": 1, "batch": 1}}
TASKS = {"tasks": {"train": [{"task": "arithmetic"}]}, "train": {"steps": 1}}
KINDS = {
    "pretrain": TEXTS,
    "sft": TEXTS,
    "dpo": TEXTS,
    "reward_model": TEXTS,
    "posttrain": {**TASKS, "algorithm": {"preset": "grpo"}},
    "distill": {**TASKS, "teacher": {"init": "teacher"}},
}


def of_kind(kind, model=None, **changes):
    """A spec of a kind that starts from a trained model."""
    return load({"kind": kind, "name": "x", "model": model or {"init": "model"}, **KINDS[kind], **changes})


@pytest.mark.parametrize(
    ("kind", "full", "lora", "decay"),
    [
        ("pretrain", 3e-4, 3e-4, 0.1),
        ("sft", 2e-5, 2e-4, 0.0),
        ("dpo", 1e-6, 1e-5, 0.0),
        ("reward_model", 1e-5, None, 0.0),
        ("posttrain", 1e-6, 1e-5, 0.01),
        ("distill", 1e-5, 1e-4, 0.0),
    ],
)
def test_optim_of_a_trained_model_has_the_defaults_of_its_kind(kind, full, lora, decay):
    loaded = of_kind(kind)
    assert (loaded.spec.optim.lr.start, loaded.spec.optim.weight_decay) == (full, decay)
    ours = "default" if kind == "pretrain" else f"default for {kind}"
    assert (loaded.origin("optim.lr"), loaded.origin("optim.weight_decay")) == (ours, ours)
    assert loaded.origin("optim.eps") == "default"
    again = load(loaded.spec)
    assert again.spec == loaded.spec
    if lora is not None:
        adapters = of_kind(kind, {"init": "model", "lora": {}})
        assert adapters.spec.optim.lr.start == lora
        assert adapters.origin("optim.lr") == ours + ("" if kind == "pretrain" else " with LoRA")


def test_optim_that_is_given_and_that_of_a_new_model_stay_as_they_were():
    given = of_kind("posttrain", optim={"name": "adamw", "lr": 3e-5})
    assert (given.spec.optim.lr.start, given.spec.optim.weight_decay) == (3e-5, 0.01)
    assert (given.origin("optim.lr"), given.origin("optim.weight_decay")) == ("python", "default for posttrain")
    shape = {"layers": 1, "width": 8, "heads": 1, "mlp": 8, "context": 8}
    new = of_kind("sft", {"shape": shape, "tokenizer": "characters"})
    assert (new.spec.optim.lr.start, new.spec.optim.weight_decay) == (3e-4, 0.1)
    assert new.origin("optim.lr") == "default"


def test_optim_muon_of_a_trained_model_needs_a_rate():
    with pytest.raises(SpecError, match=r"optim\.lr: expected a value: Muon has no default for fine-tuning"):
        of_kind("sft", optim={"name": "muon"})
    tuned = of_kind("sft", optim={"name": "muon", "lr": 1e-3}).spec.optim
    assert (tuned.adam_lr.start, tuned.weight_decay) == (2e-5, 0.0)
    assert of_kind("pretrain", optim={"name": "muon"}).spec.optim.lr.start == 0.02


def test_check_says_that_a_rate_is_the_default_of_the_kind(tmp_path, capsys):
    path = tmp_path / "sums.yaml"
    path.write_text(
        "kind: posttrain\nmodel: {init: m, lora: {}}\ntasks: {train: [{task: arithmetic}]}\n"
        "algorithm: {preset: grpo}\ntrain: {steps: 1}\n"
    )
    show_check(str(path), {}, [])
    lines = {" ".join(line.split()) for line in capsys.readouterr().out.splitlines()}
    assert {"lr: 1e-05 # default for posttrain with LoRA", "weight_decay: 0.01 # default for posttrain"} <= lines


LESS = {
    "optim.state": {"optim": {"name": "adamw", "state": "8bit"}},
    "optim.offload": {"optim": {"name": "adamw", "offload": True}},
    "train.weights": {"train": {"steps": 1, "batch": 1, "weights": "bf16"}},
    "model.lora.dora": {"model": {"init": "model", "lora": {"dora": True}}},
    "model.lora.quantize": {"model": {"init": "model", "lora": {"quantize": "nf4"}}},
}


@pytest.mark.parametrize(("field", "changes"), LESS.items(), ids=LESS)
def test_ways_to_take_less_memory_are_refused_by_name_for_several_processes(field, changes):
    assert of_kind("sft", **changes)
    with pytest.raises(SpecError, match=rf"{field}: expected .*, because several processes train: it is for one"):
        of_kind("sft", **changes, devices=2)


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        (r"train\.weights: expected fp32, because Muon", {"train": {"steps": 1, "batch": 1, "weights": "bf16"}}),
        (r"train\.ema: expected null", {"train": {"steps": 1, "batch": 1, "weights": "bf16", "ema": 0.9}}),
        (r"double_quantize: expected false", {"model": {"init": "model", "lora": {"double_quantize": True}}}),
    ],
)
def test_ways_to_take_less_memory_that_do_not_go_together_are_refused(message, changes):
    with pytest.raises(SpecError, match=message):
        of_kind("sft", **changes, optim={"name": "muon", "lr": 0.02} if "Muon" in message else {"name": "adamw"})


def test_new_fields_with_their_defaults_are_not_written_and_others_change_the_hash():
    written = plain(of_kind("sft", {"init": "model", "lora": {}}).spec)
    assert set(written["model"]["lora"]) == {"rank", "alpha", "targets"}
    assert not {"state", "offload"} & set(written["optim"])
    assert "weights" not in written["train"]
    hashes = {spec_hash(of_kind("sft", **changes).spec) for changes in ({}, *LESS.values())}
    assert len(hashes) == 1 + len(LESS)

"""The optimizers' specs as a kind would hold them: told apart by name, read from plain data, written back."""

from typing import Annotated

import pytest
from pydantic import Field, TypeAdapter, ValidationError

from palestra.spec.cadence import Cadence
from palestra.spec.optim import AdamWSpec, MuonSpec, OptimSpec
from palestra.spec.schedule import Schedule, in_fractions, warmup_problems

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
    assert warmup_problems(spec, 21) == []
    assert [path for path, _ in warmup_problems(spec, 20)] == [("lr", "warmup"), ("adam_lr", "warmup")]
    assert "'finish' (0.5 of the run)" in warmup_problems(spec, 20)[0].reason

"""Post-training on two ranks: the groups, losses and evaluations of one process, under every axis."""

import shutil
from typing import Any

import pytest
from posttrain_lab import TASK, Lab

import palestra
from palestra.errors import PalestraError
from palestra.runs.run import Run

REFERENCE: dict[str, Any] = {"preset": "grpo", "kl": {"where": "loss", "coefficient": 0.1}}
AXES = [{axis: 2} for axis in ("shard", "tensor", "context", "pipeline")]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("ranks"))


def rows(run: Run) -> list[dict[str, float]]:
    """What a run has learned, without times; the loss as exactly as FP32 adds it up in another order."""
    names = ("step", "tokens", "reward", "eval/accuracy", "loss", "grad_norm")
    return [{name: row[name] for name in names if name in row} for row in run.metrics(0)]


def assert_same(one: Run, other: Run) -> None:
    ones, others = rows(one), rows(other)
    assert [row.keys() for row in ones] == [row.keys() for row in others]
    for mine, theirs in zip(ones, others, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    rewards = [row["reward"] for row in ones if "reward" in row]
    assert len(set(rewards)) > 1  # something has happened


@pytest.fixture(scope="module")
def alone(lab: Lab) -> Run:
    return lab.run(algorithm=REFERENCE, tasks__eval=[{"task": TASK}])


@pytest.mark.parametrize(
    "parallel", [AXES[0], *(pytest.param(axes, marks=pytest.mark.slow) for axes in AXES[1:])], ids=str
)
def test_two_ranks_with_a_reference_learn_what_one_process_learns(lab: Lab, alone: Run, parallel: dict[str, int]):
    together = lab.run(algorithm=REFERENCE, tasks__eval=[{"task": TASK}], parallel=parallel)
    assert_same(alone, together)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", AXES, ids=str)
def test_two_ranks_with_a_value_model_learn_what_one_process_learns(lab: Lab, parallel: dict[str, int]):
    changes: dict[str, Any] = {"algorithm": {"preset": "ppo"}, "rollout__staleness": 0}
    assert_same(lab.run(**changes), lab.run(**changes, parallel=parallel))


def test_axes_that_the_model_does_not_allow_are_refused_before_there_is_a_folder(lab: Lab):
    before = set(lab.root.glob("*/*"))
    with pytest.raises(PalestraError, match=r"parallel\.tensor: expected a divisor of the model's kv_heads = 2"):
        lab.run(parallel={"tensor": 4})
    with pytest.raises(PalestraError, match="data · shard · expert of at most 16, the examples of a step, got 32"):
        lab.run(parallel={"shard": 32})
    with pytest.raises(PalestraError, match=r"parallel\.pipeline: expected 1, because adapters are not split"):
        lab.run(parallel={"pipeline": 2}, model__lora={"rank": 2})
    with pytest.raises(PalestraError, match=r"parallel\.schedule: expected 1f1b or interleaved"):
        lab.run(parallel={"pipeline": 2, "schedule": "zero_bubble"}, algorithm={"preset": "ppo"})
    assert set(lab.root.glob("*/*")) == before


@pytest.mark.slow
@pytest.mark.parametrize("parallel", AXES, ids=str)
def test_run_with_a_value_model_continues_under_its_layout_to_the_bit_and_under_another(lab: Lab, parallel):
    changes: dict[str, Any] = {"algorithm": {"preset": "ppo"}, "rollout__staleness": 0}
    whole = lab.run(**changes, parallel=parallel)
    half = lab.run(**changes, parallel=parallel, train__steps=3)
    other = AXES[AXES.index(parallel) - 1]
    for layout, exact in ((parallel, True), (other, False)):
        copy = lab.root / "copies" / f"{next(iter(parallel))}_{exact}"
        shutil.copytree(half.path, copy)
        overrides = ["train.steps=5", f"parallel={layout}".replace("'", "")]
        longer = palestra.run(
            resume=copy, root=lab.root, quiet=True, overrides=overrides, allow=["train.steps", "parallel"]
        )
        last, expected = rows(longer)[-1], rows(whole)[-1]
        assert last == (expected if exact else pytest.approx(expected, rel=1e-4, abs=1e-6))


@pytest.mark.slow
@pytest.mark.parametrize("parallel", AXES, ids=str)
def test_run_of_two_ranks_continues_on_one(lab: Lab, alone: Run, parallel: dict[str, int]):
    half = lab.run(algorithm=REFERENCE, tasks__eval=[{"task": TASK}], parallel=parallel, train__steps=3)
    changes = ["train.steps=5", "parallel={}"]
    longer = palestra.run(resume=half, root=lab.root, quiet=True, overrides=changes, allow=["train.steps", "parallel"])
    assert rows(longer)[-1] == pytest.approx(rows(alone)[-1], rel=1e-4, abs=1e-6)

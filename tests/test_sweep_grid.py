"""From a sweep block to its runs: the published table of sizes, names that never collide, and every problem told."""

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_lm import spec_of

import palestra
from palestra.errors import UsageError
from palestra.spec.blocks import SweepAxis, SweepSpec, label
from palestra.spec.grid import LENGTH, identity, points, run_name
from palestra.spec.load import to_yaml
from palestra.sweep.results import sizes
from palestra.sweep.run import default_group, plan

ROOT = Path(__file__).parent.parent
SIZES = ROOT / "examples/sweeps/olmoe_sizes.yaml"
# Marin's sweep of OLMoE-like sizes: parameters a token meets and in all, batch, steps at a context of 2,048; then steps
# and FLOPs at 4,096 with 64 sequences a step.
TABLE = {
    "s": ("218.3M", "267.8M", 128, 16_654, 16_654, "4.46e+18"),
    "m": ("338.4M", "602.6M", 128, 25_816, 25_816, "1.25e+19"),
    "l": ("734.6M", "2320.0M", 64, 112_087, 56_043, "6.52e+19"),
    "1b7b": ("1534.1M", "7171.3M", 64, 234_090, 117_045, "2.84e+20"),
}
RATES = {"s": (0.01, 0.003), "m": (0.008, 0.0024), "l": (0.008, 0.0024), "1b7b": (0.004, 0.0012)}


def spec(sweep: dict[str, Any], **changes: Any) -> Any:
    return palestra.check({**spec_of("pretrain", Path("data"), **changes), "sweep": sweep}).spec


def runs_of(found: Any) -> list[Any]:
    """Its runs, whose specs may be of any kind."""
    return points(found)


def planned(path: Path, **settings: Any) -> list[Any]:
    return plan(path, **settings).points


def in_millions(count: float) -> str:
    return f"{count / 1e6:.1f}M"


def test_sizes_sweep_has_the_runs_parameters_and_steps_of_the_published_table():
    made = planned(SIZES)

    assert [(p.at["size"], p.at["lr"]) for p in made] == [(s, x) for s in TABLE for x in (0.25, 0.5, 2.0, 4.0)]
    for point in made:
        active, total, batch, steps, _, _ = TABLE[point.at["size"]]
        told = sizes(point.spec)
        assert (in_millions(told["active parameters"]), in_millions(told["parameters"])) == (active, total)
        assert (point.spec.train.batch, told["steps"]) == (batch, steps)
        assert told["tokens"] == batch * 2048 * steps


def test_sizes_sweep_at_4096_has_the_steps_and_flops_of_the_published_table():
    for point in planned(SIZES.with_name("olmoe_sizes_4096.yaml")):
        told = sizes(point.spec)
        assert told["steps"] == TABLE[point.at["size"]][4]
        assert f"{told['training FLOPs']:.2e}" == TABLE[point.at["size"]][5]
        assert point.spec.train.batch == 64


def test_sizes_sweep_multiplies_the_rates_of_each_size():
    for point in planned(SIZES):
        lr, adam_lr = RATES[point.at["size"]]
        assert point.spec.optim.lr.start == pytest.approx(lr * point.at["lr"], rel=1e-12)
        assert point.spec.optim.adam_lr.start == pytest.approx(adam_lr * point.at["lr"], rel=1e-12)
        assert point.spec.optim.lr.begin == (0.2 if point.at["size"] == "s" else 0.0)


def test_bilinear_experts_beside_swiglu_are_pairs_of_one_size_in_one_group():
    both = plan(SIZES, overrides=["sweep.axes.experts.values=[swiglu, bilinear]"])
    alone = plan(SIZES)

    assert len({point.name for point in both.points}) == 32
    assert {point.name for point in alone.points} < {point.name for point in both.points}
    assert both.folder == alone.folder
    by = {tuple(point.at.values()): sizes(point.spec) for point in both.points}
    assert all(told == by[size, "bilinear", lr] for (size, experts, lr), told in by.items() if experts == "swiglu")


def test_only_keeps_the_settings_that_are_named():
    assert [p.at["lr"] for p in plan(SIZES, only=["size=1b7b"]).points] == [0.25, 0.5, 2.0, 4.0]
    assert len(plan(SIZES, only=["size=s,m", "lr=2"]).points) == 2
    with pytest.raises(UsageError, match="axis 'size' has no xl; it has s, m, l, 1b7b"):
        plan(SIZES, only=["size=xl"])
    with pytest.raises(UsageError, match="of the axes size, experts, lr"):
        plan(SIZES, only=["width=3"])


def test_plan_writes_nothing(tmp_path):
    plan(SIZES, root=tmp_path / "runs")

    assert list(tmp_path.iterdir()) == []


def test_group_is_the_name_and_the_short_commit_unless_it_is_given(tmp_path):
    assert re.fullmatch(r"olmoe_sizes_[0-9a-f]{7,12}", plan(SIZES).folder.name) or default_group("x") == "x"
    assert plan(SIZES, group="mine", root=tmp_path).folder == tmp_path / "mine"


def test_excluded_combinations_are_left_out():
    axes = {"train.batch": [2, 4], "seed": [0, 1, 2]}
    kept = runs_of(spec({"axes": axes, "exclude": [{"train.batch": 4, "seed": 1}, {"seed": 2}]}))

    assert [tuple(p.at.values()) for p in kept] == [(2, 0), (2, 1), (4, 0)]
    assert [(p.spec.train.batch, p.spec.seed) for p in kept] == [(2, 0), (2, 1), (4, 0)]


def test_values_axis_with_of_sets_all_its_fields():
    axes = {"context": {"values": [16, 32], "of": ["data.context", "model.shape.context"]}}

    assert [(p.spec.data.context, p.spec.model.shape.context) for p in runs_of(spec({"axes": axes}))] == [
        (16, 16),
        (32, 32),
    ]


def test_whole_number_is_multiplied_to_a_whole_number_where_it_comes_out_even():
    found = points(spec({"axes": {"size": {"multiply": [0.5, 1, 2], "of": ["train.batch"]}}}))
    batch = found[1].spec.train.batch
    assert [point.spec.train.batch for point in found] == [batch // 2, batch, 2 * batch]
    with pytest.raises(UsageError, match=r"train\.batch: expected a whole number"):
        spec({"axes": {"size": {"multiply": [0.37], "of": ["train.batch"]}}})


def test_points_are_laid_over_the_spec_and_factors_come_last():
    sweep = {
        "axes": {
            "lr": {"multiply": [0.5, 2], "of": ["optim.lr"]},
            "size": {"points": {"a": {}, "b": {"model": {"shape": {"width": 64}}, "optim": {"lr": 0.5}}}},
        }
    }
    made = {(p.at["lr"], p.at["size"]): p.spec for p in runs_of(spec(sweep))}

    assert {at: run.optim.lr.start for at, run in made.items()} == {
        (0.5, "a"): 1.5e-3,
        (2.0, "a"): 6e-3,
        (0.5, "b"): 0.25,
        (2.0, "b"): 1.0,
    }
    assert made[0.5, "b"].model.shape.width == 64
    assert made[0.5, "b"].model.shape.layers == made[0.5, "a"].model.shape.layers == 2


@pytest.mark.parametrize(
    ("sweep", "told"),
    [
        ({"axes": {"train.stepz": [1, 2]}}, "train.stepz: unknown key"),
        ({"axes": {"train.batch": [1, 0]}}, "train.batch: expected a whole number of at least 1"),
        ({"axes": {"train.batch": [1, 1]}}, "duplicate: 1"),
        ({"axes": {"name": ["a", "b"]}}, "'name' cannot be swept"),
        ({"axes": {}}, "axes: expected a mapping of axes"),
        ({"axes": {"a": {"values": [1], "points": {"x": {}}}}}, "got values and points"),
        ({"axes": {"a": {"points": {"x": {"train": {"batch": 2}}}}, "train.batch": [1]}}, "so does axis 'a'"),
        ({"axes": {"train": [{"steps": 3, "batch": 2}], "train.batch": [1]}}, "so does axis 'train'"),
        ({"axes": {"a": {"points": {"x": {}, "y": {}}}}}, "a x and a y are the same run"),
        ({"axes": {"x": {"multiply": [2], "of": ["optim.eps"]}}}, "the spec gives no optim.eps to multiply"),
        ({"axes": {"x": {"multiply": [2], "of": ["optim.name"]}}}, "neither a number nor a schedule"),
        ({"axes": {"seed": [0]}, "exclude": [{"seed": 0}]}, "leaves out every run"),
        ({"axes": {"seed": [0]}, "exclude": [{"sead": 0}]}, "there is no axis 'sead'"),
        ({"axes": {"seed": [0]}, "exclude": [{"seed": 3}]}, "axis 'seed' has no 3; it has: 0"),
        ({"axes": {"seed": [0]}, "tokens_per_parameter": 20}, "counted from model.shape.vocab"),
        ({"axes": {"seed": [0]}, "group": "a/b"}, "group: expected a name"),
    ],
)
def test_sweep_that_cannot_be_says_why_before_anything_runs(sweep, told):
    with pytest.raises(UsageError, match=re.escape(told)):
        spec(sweep)


def test_tokens_per_parameter_of_a_kind_without_them_is_refused():
    control = {"kind": "control", "name": "c", "env": {"id": "CartPole-v1"}, "algorithm": {"name": "ppo"}}
    control |= {"train": {"frames": 4096}, "sweep": {"axes": {"seed": [0, 1]}, "tokens_per_parameter": 1}}
    with pytest.raises(UsageError, match="kind control is not counted in tokens"):
        palestra.check(control)


def test_spec_with_a_sweep_survives_being_written_and_read(tmp_path):
    whole = palestra.check(SIZES).spec
    path = tmp_path / "again.yaml"
    path.write_text(to_yaml(whole))

    assert palestra.check(path).spec == whole
    assert [p.name for p in plan(path).points] == [p.name for p in plan(SIZES).points]


def test_name_depends_on_what_comes_of_a_run_and_on_nothing_else():
    sweep = {"axes": {"seed": [0, 1]}}
    names = [p.name for p in points(spec(sweep))]

    assert [p.name for p in points(spec(sweep, device="cpu", threads=2, name="other", every__log="3 steps"))] == names
    assert [p.name for p in points(spec({"axes": {"seed": [1, 0]}}))] == names[::-1]
    assert not {p.name for p in points(spec(sweep, train__batch=7))} & set(names)
    assert all(p.name.endswith(f"-late-{identity(p.spec)[:8]}") for p in points(spec({**sweep, "suffix": "late"})))


def test_null_and_the_default_are_two_runs_and_the_default_said_or_not_is_one():
    two = runs_of(spec({"axes": {"optim.max_grad_norm": [None, 1.0]}}))

    assert len({p.name for p in two}) == 2
    assert identity(two[1].spec) == identity(palestra.check(spec_of("pretrain", Path("data"))).spec)


BASE = palestra.check(spec_of("pretrain", Path("data"))).spec
TEXT = st.text(min_size=1, max_size=90)


@given(
    ends=st.lists(TEXT, min_size=2, max_size=6, unique=True),
    beginning=st.sampled_from(["", "b" * 40, "b" * 70, "ü/" * 40]),
    axis=TEXT,
    suffix=st.none() | st.just("s" * 24),
)
def test_names_never_collide_however_long_and_strange_the_labels_are(ends, beginning, axis, suffix):
    """Labels that are the same in their first 64 characters, or once odd characters are replaced, stay apart."""
    labels = [beginning + end for end in ends]
    sweep = SweepSpec(axes={axis: SweepAxis(points={text: {} for text in labels})}, suffix=suffix)
    runs = [BASE.model_copy(update={"seed": seed}) for seed in range(len(labels))]
    names = [run_name(run, sweep, {axis: text}) for run, text in zip(runs, labels, strict=True)]

    assert len(set(names)) == len(labels)
    assert len({name.lower() for name in names}) == len(labels)
    for name in names:
        assert len(name) <= LENGTH
        assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name)
        assert suffix is None or f"-{suffix}-" in name


@given(value=st.floats(allow_nan=False, allow_infinity=False) | st.integers() | st.booleans() | st.text())
def test_label_of_a_number_is_its_own(value):
    if isinstance(value, float):
        assert float(label(value)) == value
    elif isinstance(value, str):
        assert label(value) == value
    else:
        assert label(value) == str(value).lower()

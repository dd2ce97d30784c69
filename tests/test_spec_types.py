"""Cadences, schedules, the control spec, and the documentation of every field."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from palestra.errors import UsageError
from palestra.rl.schedules import value
from palestra.spec.kinds import kinds, spec_type
from palestra.spec.kinds.control import ControlSpec, PPOSpec
from palestra.spec.load import load
from palestra.spec.model import Cadence, CountCadence, Model
from palestra.spec.schedule import Schedule, ScheduleSpec, in_fractions
from palestra.spec.validate import models

MINIMAL = {
    "kind": "control",
    "name": "x",
    "env": {"id": "CartPole-v1"},
    "algorithm": {"name": "ppo"},
    "train": {"frames": 1000},
}
LINEAR = {"shape": "linear", "start": 1}

# --- cadences


@pytest.mark.parametrize(
    ("text", "amount", "unit", "written"),
    [
        ("5 minutes", 5, "minutes", "5 minutes"),
        ("1 step", 1, "steps", "1 step"),
        ("1e4 frames", 10_000, "frames", "10000 frames"),
        ("1_000 frames", 1000, "frames", "1000 frames"),
        ("0.5 hours", 0.5, "hours", "0.5 hours"),
        ("1 hour", 1, "hours", "1 hour"),
        ("90seconds", 90, "seconds", "90 seconds"),
        (" 2  steps ", 2, "steps", "2 steps"),
        ("2 steps until 1e1", 2, "steps", "2 steps until 10"),
    ],
)
def test_cadence_text_is_parsed_and_written(text, amount, unit, written):
    cadence = Cadence.parse(text)
    assert (cadence.amount, cadence.unit, str(cadence)) == (amount, unit, written)
    assert Cadence.parse(written) == cadence


@pytest.mark.parametrize(
    "text",
    [
        "",
        "5",
        "minutes",
        "-5 steps",
        "0 steps",
        "2.5 frames",
        "5 days",
        "5 stepss",
        "5 m",
        "inf hours",
        "1e999 steps",
        "5 steps until 4",
        "5 steps until 9.5",
        "1 minute until 9",
        "5 steps until",
    ],
)
def test_cadence_bad_text_is_refused(text):
    with pytest.raises(ValueError, match="expected"):
        Cadence.parse(text)


@given(st.integers(1, 1000), st.integers(0, 5000), st.integers(0, 3000))
def test_cadence_crossed_equals_counting_the_multiples(amount, before, length):
    multiples = [n for n in range(before + 1, before + length + 1) if n % amount == 0]
    assert Cadence(amount, "steps").crossed(before, before + length) == bool(multiples)


def test_cadence_time_has_seconds_and_counts_have_not():
    assert Cadence.parse("1.5 minutes").seconds == 90
    assert Cadence.parse("2 hours").seconds == 7200
    assert Cadence.parse("2 hours").is_time
    with pytest.raises(ValueError, match="no length"):
        _ = Cadence.parse("2 steps").seconds
    with pytest.raises(ValueError, match="is time"):
        Cadence.parse("2 hours").crossed(0, 1)


def test_cadence_that_must_be_counted_refuses_time():
    counted = TypeAdapter(CountCadence)
    assert counted.validate_python("1e4 frames") == Cadence(10_000, "frames")
    with pytest.raises(ValidationError, match="never timed in minutes, because a resumed run must repeat them exactly"):
        counted.validate_python("5 minutes")


def test_cadence_one_checkpoint_becomes_a_list():
    spec = load(MINIMAL | {"every": {"checkpoint": "1e5 frames"}}).spec
    assert spec.every.checkpoint == [Cadence(100_000, "frames")]


# --- schedules


def test_schedule_bare_number_is_a_constant_and_is_written_as_one():
    adapter = TypeAdapter(ScheduleSpec)
    for given_value in (1, 1.0, {"shape": "constant", "start": 1}):
        schedule = adapter.validate_python(given_value)
        assert (schedule.shape, schedule.start) == ("constant", 1.0)
        assert adapter.dump_python(schedule, mode="json") == 1.0


def test_schedule_is_written_with_only_what_its_shape_reads():
    schedule = Schedule(shape="rate", start=1, end=0.1, rate=0.5)
    written = schedule.model_dump(mode="json")
    assert written == {"shape": "rate", "start": 1, "end": 0.1, "begin": 0, "finish": 1, "rate": 0.5}
    assert Schedule.model_validate(written) == schedule


@pytest.mark.parametrize("value", [True, "0.1", None, [0.1], float("inf")])
def test_schedule_of_another_type_is_refused(value):
    with pytest.raises(ValidationError):
        TypeAdapter(ScheduleSpec).validate_python(value)


def test_schedule_warmup_is_a_fraction_or_steps_and_written_where_there_is_one():
    adapter = TypeAdapter(ScheduleSpec)
    for warmup, meant in [(0.1, 0.1), (0, 0.0), ("1e2 steps", Cadence(100, "steps")), ("1 step", Cadence(1, "steps"))]:
        schedule = adapter.validate_python({"shape": "constant", "start": 1, "warmup": warmup})
        assert schedule.warmup == meant
        written = adapter.dump_python(schedule, mode="json")
        assert written == ({"shape": "constant", "start": 1, "warmup": str(meant)} if isinstance(meant, Cadence) else
                           {"shape": "constant", "start": 1, "warmup": meant} if meant else 1)  # fmt: skip
        assert adapter.validate_python(written) == schedule


@pytest.mark.parametrize("warmup", [1, -0.1, True, None, "10", "10 frames", "5 minutes", "0 steps", [1]])
def test_schedule_warmup_of_another_kind_is_refused(warmup):
    with pytest.raises(ValidationError, match="expected a fraction of the run of at least 0 and below 1, or a count"):
        Schedule.model_validate({"shape": "linear", "start": 1, "warmup": warmup})


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"shape": "linear", "warmup": 0.5, "finish": 0.5}, "'warmup' .0.5. must end before 'finish' .0.5."),
        ({"shape": "wsd"}, "a wsd schedule needs 'begin'"),
        ({"shape": "inverse_sqrt"}, "an inverse_sqrt schedule needs 'warmup' or 'begin'"),
        ({"shape": "wsd", "begin": 0.8, "rate": 0.5}, "a wsd schedule does not use 'rate'"),
    ],
)
def test_schedule_that_cannot_be_followed_is_refused(fields, reason):
    with pytest.raises(ValidationError, match=reason):
        Schedule.model_validate({"start": 1} | fields)


def test_schedule_warmup_in_steps_becomes_a_fraction_of_the_run():
    spec = PPOSpec.model_validate({"name": "ppo", "clip": 0.1, "lr": LINEAR | {"warmup": "5 steps"}})
    settings = in_fractions(spec, 20)
    assert settings.lr == Schedule(shape="linear", start=1, warmup=0.25)
    assert settings.model_copy(update={"lr": spec.lr}) == spec
    assert value(progress=0.125, **settings.lr.arguments()) == 0.5
    with pytest.raises(ValueError, match="how much of the run '5 steps' are"):
        spec.lr.arguments()


def test_schedule_warmup_longer_than_the_run_is_named_with_its_place():
    steps = load(MINIMAL).spec.steps
    for warmup, fits in [(f"{steps - 1} steps", True), (f"{steps} steps", False)]:
        data = MINIMAL | {"algorithm": {"name": "ppo", "lr": LINEAR | {"warmup": warmup}}}
        if fits:
            load(data)
        else:
            with pytest.raises(
                UsageError, match=rf"algorithm.lr.warmup: expected a warm-up .* before the run of {steps} st"
            ):
                load(data)


# --- control


def test_control_derived_counts_of_the_published_cartpole_spec():
    spec = load("examples/control/ppo_cartpole.yaml").spec
    assert isinstance(spec, ControlSpec)
    assert spec.seeds == [0, 1, 2, 3]
    assert spec.derived() == {
        "frames per step": 1024,
        "steps": 196,
        "frames in total": 200_704,
        "gradient steps per step": 120,
        "gradient steps in total": 23_520,
        "evaluation": "10 episodes every 10000 frames at most, within 20,000 frames",
    }


@given(st.integers(1, 64), st.integers(1, 16), st.integers(1, 100_000))
def test_control_steps_are_the_fewest_that_hold_all_frames(horizon, num_envs, frames):
    batch = horizon * num_envs
    spec = ControlSpec.model_validate(
        MINIMAL
        | {"env": {"id": "x", "num_envs": num_envs}, "train": {"frames": frames}}
        | {"algorithm": {"name": "ppo", "horizon": horizon, "minibatch": batch, "normalize_advantages": False}}
    )
    assert (spec.steps - 1) * batch < frames <= spec.steps * batch
    assert spec.updates == 4 * spec.steps


def test_spec_is_frozen():
    spec = load(MINIMAL).spec
    with pytest.raises(ValidationError):
        spec.seed = 3


def test_spec_made_in_python_is_checked_as_a_whole():
    with pytest.raises(ValidationError, match="expected at most horizon × num_envs"):
        ControlSpec.model_validate(MINIMAL | {"algorithm": PPOSpec(name="ppo", minibatch=4096)})


# --- documentation


def every_model():
    found: dict[type[Model], None] = {}

    def visit(model):
        found[model] = None
        for field in model.model_fields.values():
            for inner in models(field.annotation):
                if inner not in found:
                    visit(inner)

    for kind in kinds():
        visit(spec_type(kind))
    return list(found)


def test_every_model_walk_reaches_the_leaves():
    assert {PPOSpec, Schedule} <= set(every_model())


@pytest.mark.parametrize("model", every_model(), ids=lambda model: model.__name__)
def test_every_field_has_a_one_line_docstring_and_every_model_is_strict(model):
    assert issubclass(model, Model)
    assert model.__doc__
    descriptions = model.descriptions()
    for name in model.model_fields:
        assert descriptions.get(name), f"{model.__name__}.{name} has no docstring"
        assert "\n" not in descriptions[name]
        assert descriptions[name].endswith("."), f"{model.__name__}.{name}"
    assert model.model_config["extra"] == "forbid"
    assert model.model_config["strict"] is True
    assert model.model_config["frozen"] is True

"""Renamed keys and values: refused in a spec, translated in what is stored, and without effect on hashes."""

import json
from pathlib import Path

import pytest

from palestra.runs.run import Run
from palestra.spec.load import load, resolved, spec_hash
from palestra.spec.model import plain
from palestra.spec.renames import FORWARD, original, translated
from palestra.spec.validate import SpecError

CONTROL = {
    "kind": "control",
    "name": "a",
    "env": {"id": "CartPole-v1", "normalize_obs": True},
    "algorithm": {"name": "a2c", "normalize_advantages": True},
    "search": {"space": {"algorithm.normalize_advantages": {"choice": [True, False]}}, "direction": "maximize"},
    "train": {"frames": 1000},
}
POSTTRAIN = {
    "kind": "posttrain",
    "name": "a",
    "model": {"init": "somewhere"},
    "tasks": {"train": [{"task": "arithmetic"}]},
    "algorithm": {"preset": "grpo", "truncated": {"type": "penalize"}},
    "train": {"steps": 1},
}


def test_hash_of_a_spec_with_renamed_keys_is_the_one_it_had_before():
    # Made with the commit before the keys were renamed.
    known = {
        "examples/control/a2c_cartpole.yaml": "9f9ed6128e03d474",
        "examples/control/ddqn_per_cartpole.yaml": "e30404dec592623c",
    }
    found = {path: spec_hash(load(Path(__file__).parents[1] / path).spec)[:16] for path in known}
    assert found == known


@pytest.mark.parametrize(
    ("spec", "path", "old", "new"),
    [
        (CONTROL, "env", "normalise_obs", "normalize_obs"),
        (CONTROL, "algorithm", "normalise_advantages", "normalize_advantages"),
        ({**CONTROL, "algorithm": {"name": "dqn"}}, "algorithm", "prioritised", "prioritized"),
    ],
)
def test_old_key_in_a_spec_is_refused_and_the_new_one_named(spec, path, old, new):
    with pytest.raises(SpecError) as error:
        load(spec, overrides={f"{path}.{old}": True})
    assert [(problem.path, problem.reason) for problem in error.value.problems] == [
        (f"{path}.{old}", f"renamed to '{new}'")
    ]


@pytest.mark.parametrize(
    ("spec", "path", "old", "new"),
    [
        (CONTROL, "search.direction", "maximise", "maximize"),
        (POSTTRAIN, "algorithm.anchor", "behaviour", "behavior"),
        (POSTTRAIN, "algorithm.truncated", {"type": "penalise"}, "penalize"),
    ],
)
def test_old_value_in_a_spec_is_refused_and_the_new_one_named(spec, path, old, new):
    with pytest.raises(SpecError, match=f"was renamed to '{new}'"):
        load(spec, overrides={path: old})


def test_old_axis_of_a_search_is_refused():
    with pytest.raises(SpecError, match="normalize_advantages"):
        load({**CONTROL, "search": {"space": {"algorithm.normalise_advantages": {"choice": [True, False]}}}})


@pytest.mark.parametrize("spec", [CONTROL, POSTTRAIN])
def test_stored_spec_with_old_words_reads_as_the_new_one(spec):
    whole = load(spec).spec
    stored = json.loads(json.dumps(original(plain(whole))))
    assert stored != plain(whole)
    assert resolved(translated(stored)) == whole
    assert spec_hash(resolved(translated(stored))) == spec_hash(whole)


def test_words_of_the_user_are_not_translated():
    kwargs = {"env": {"id": "X-v0", "kwargs": {"normalise_obs": True, "direction": "maximise", "type": "penalise"}}}
    assert translated(kwargs) == kwargs


def test_every_rename_goes_both_ways():
    for path in FORWARD:
        data = {path[0]: {path[1]: path[2] if len(path) == 3 else 1}}
        assert translated(data) != data
        assert original(translated(data)) == data


def test_run_stored_with_old_words_is_read_with_the_new_ones(tmp_path):
    spec = original(plain(load(CONTROL).spec))
    folder = tmp_path / "a" / "20260101T000000-0000"
    session = folder / "sessions" / "0"
    session.mkdir(parents=True)
    about = {"name": "a", "id": "1", "seeds": [0], "created": "2026-01-01T00:00:00+00:00", "command": [], "spec": spec}
    (folder / "trial.json").write_text(json.dumps(about))
    assert Run(folder).trial.info["spec"]["env"]["normalize_obs"] is True
    (session / "manifest.json").write_text(json.dumps({"seed": 0, "spec": spec}))
    assert Run(folder).spec == translated(spec)
    assert resolved(Run(folder).spec) == load(CONTROL).spec
